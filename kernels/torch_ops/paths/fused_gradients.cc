// Computes gradients of dot products in 16 bits with the fused kernels. Either the fused kernel
// recomputes the products, with another epilogue, or cached exponentials are converted.

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/common/row_gradient.h"
#include "kernels/common/tile.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/params.h"
#include "kernels/row_ops/cached_gradients.h"
#include "kernels/row_ops/rebase_exponentials.h"
#include "kernels/row_ops/row_constants.h"
#include "kernels/torch_ops/paths/fused_path.h"
#include "kernels/torch_ops/paths/kernel_arrays.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/kernel_operands.h"
#include "kernels/torch_ops/types/kernel_dtype.h"

namespace logprobd::torch_ops {
namespace {

using kernels::kTileColumns;
using kernels::RowGradient;

/// Largest size in bytes of a block of gradients while the hidden states of compacted rows exist as
/// a copy. The copy takes as much memory as the gradient of hidden takes later, so the extra memory
/// consists of the block and up to 6 MiB of per-row data.
constexpr int64_t kGradientBytesMaxWithCopy = int64_t{250} << 20;

/// Blocks are whole multiples of this many tiles, which suits the groups of tiles of the fused
/// kernel (kernels/fused/choice.h) and the tiles of cuBLAS: at hidden size 2,048, blocks
/// of 40 tiles were measured to take a tenth longer than blocks of 32.
constexpr int64_t kTileGroup = 16;

class FusedDotGradients : public DotGradients {
 public:
  explicit FusedDotGradients(const DotGradientsArguments& arguments)
      : rows_(arguments.rows),
        problem_(arguments.problem),
        bias_sum_(arguments.bias_sum),
        column_bytes_beside_(arguments.column_bytes_beside),
        layout_(problem_.inputs.weight.size(0)),
        head_(problem_),
        pending_(rows_.rows.pending),
        num_rows_(rows_.rows.size()) {
    const auto& hidden = rows_.rows.hidden;
    if (rows_.upstream.mean_logit.has_value()) {
      const Columns all = {0, problem_.shard.columns};
      mean_logit_weights_ = PaddedToTiles(MeanLogitWeights(problem_, all), all.size());
    }
    row_gradients_ = at::empty({num_rows_ * static_cast<int64_t>(sizeof(RowGradient))},
                               hidden.options().dtype(at::kByte));
    ComputeRowGradients();
    if (is_rebased()) RebaseExponentials();
    if (!uses_cache()) hidden_.emplace(hidden, problem_);
    if (!is_in_place()) buffer_ = at::empty({BufferSize()}, problem_.inputs.weight.options());
  }

  Columns Next(int64_t begin) const override {
    const int64_t columns = problem_.shard.columns;
    if (is_in_place()) return {begin, columns};
    const int64_t tiles = BlockTiles(buffer_.size(0) / (num_rows_ * kTileColumns));
    return {begin, std::min(begin + tiles * kTileColumns, columns)};
  }

  at::Tensor Form(Columns columns) override {
    const c10::cuda::CUDAGuard on_device(row_gradients_.device());
    const int64_t tile_begin = columns.begin / kTileColumns;
    const int64_t tile_end = tile_begin + kernels::NumTiles(columns.size());
    const at::Tensor tiles = Destination(tile_end - tile_begin);
    if (!uses_cache()) {
      Recompute(tile_begin, tile_end, tiles);
    } else if (!is_rebased()) {
      ConvertCached(tile_begin, tile_end, tiles);
    }
    // Waits for the number of rows only now that the kernel is enqueued and runs.
    if (pending_ != nullptr) num_rows_ = std::exchange(pending_, nullptr)->Result().size(num_rows_);
    at::Tensor gradient = tiles.narrow(0, 0, num_rows_).narrow(1, 0, columns.size());
    AddBias(gradient, columns);
    return gradient;
  }

  at::Tensor RowFactors() const override { return factors_; }

  std::vector<at::Tensor> HiddenTerms() const override {
    const at::Tensor& hidden = rows_.rows.hidden;
    if (!factors_.defined()) {
      return hidden_.has_value() ? hidden_->Terms() : FusedRows(hidden, problem_).Terms();
    }
    // The range of fp16 is too small for the factors.
    const at::Tensor wide = hidden.scalar_type() == at::kHalf ? hidden.to(at::kFloat) : hidden;
    at::Tensor products = at::empty(wide.sizes(), wide.options());
    problem_.device_ops->MultiplyRows(wide, factors_, products);
    return FusedRows(products, problem_).Terms();
  }

 private:
  /// Null when the number of rows is known.
  const int64_t* row_count() const { return pending_ == nullptr ? nullptr : pending_->count(); }

  /// Returns the number of tiles of a block if there is memory for `tiles`. There are as few blocks
  /// as possible, of about the same size, since products of few columns are slow.
  int64_t BlockTiles(int64_t tiles) const {
    const int64_t all = head_.num_tiles();
    if (tiles >= all) return all;
    const int64_t most =
        tiles >= kTileGroup ? tiles / kTileGroup * kTileGroup : std::max<int64_t>(tiles, 1);
    const int64_t num_blocks = (all + most - 1) / most;
    const int64_t num_groups = (all + num_blocks * kTileGroup - 1) / (num_blocks * kTileGroup);
    return std::min(most, num_groups * kTileGroup);
  }

  /// Number of elements of the buffer for a block of columns.
  int64_t BufferSize() const {
    const int64_t tile_size = num_rows_ * kTileColumns;
    const at::Tensor& hidden = rows_.rows.hidden;
    int64_t bytes = kGradientBytesMax;
    // The memory for the gradient of hidden in its own dtype is needed only after the block is
    // freed. In fp32 the sum itself is returned.
    if (hidden.scalar_type() != at::kFloat) bytes += static_cast<int64_t>(hidden.nbytes());
    if (rows_.saved.cache.has_value() && IsPartlyCached(problem_)) {
      bytes = GradientBytesBeside(static_cast<int64_t>(rows_.saved.cache->nbytes()));
    }
    if (pending_ != nullptr) bytes = std::min(bytes, kGradientBytesMaxWithCopy);
    const int64_t tile_bytes = 2 * tile_size + kTileColumns * column_bytes_beside_;
    return BlockTiles(bytes / tile_bytes) * tile_size;
  }

  /// Whether the gradients come from cached exponentials. The gradient of a mean logit needs
  /// columns whose probability is 0, which the cache lacks.
  bool uses_cache() const {
    return rows_.cached.cache.defined() && !rows_.upstream.mean_logit.has_value();
  }

  /// Whether gradients overwrite the cached exponentials, which have the same size. The rows must
  /// be those of the cache, in order.
  bool is_in_place() const {
    return uses_cache() && rows_.saved.is_cache_overwritable && cached_rows() == nullptr;
  }

  /// Whether rebasing alone turns the exponentials into gradients, up to a factor per row.
  bool is_rebased() const {
    return is_in_place() &&
           problem_.options.memory.keep_logits == LogitCacheKind::kRebasedExponentials;
  }

  /// Memory for the gradients of some tiles, [n, 192 * tiles].
  at::Tensor Destination(int64_t tiles) const {
    const int64_t columns = tiles * kTileColumns;
    if (!is_in_place()) return buffer_.as_strided({num_rows_, columns}, {columns, 1});
    const at::ScalarType dtype = problem_.inputs.weight.scalar_type();
    return rows_.cached.cache.narrow(0, 0, num_rows_).view(dtype).narrow(1, 0, columns);
  }

  void Recompute(int64_t tile_begin, int64_t tile_end, const at::Tensor& tiles) const {
    kernels::FusedGradientParams params;
    params.head = head_.Params(hidden_->Slice(0, num_rows_), tile_begin, tile_end);
    params.head.row_count = row_count();
    params.rows = row_gradients();
    params.mean_logit_weights = Floats(mean_logit_weights_);
    params.gradients = tiles.mutable_data_ptr();
    params.gradient_stride = tiles.stride(0);
    CheckLaunch(LaunchFusedGradient(params, c10::cuda::getCurrentCUDAStream()),
                "the fused gradient");
  }

  void ConvertCached(int64_t tile_begin, int64_t tile_end, const at::Tensor& tiles) const {
    kernels::CachedGradientsParams params;
    params.num_rows = num_rows_;
    params.row_count = row_count();
    params.cached_rows = cached_rows();
    params.exponentials = reinterpret_cast<const __nv_bfloat16*>(cache());
    params.exponents = reinterpret_cast<const int32_t*>(cache() + layout_.exponents());
    params.row_tiles = layout_.row_tiles();
    params.exponent_stride = layout_.row_bytes() / static_cast<int64_t>(sizeof(int32_t));
    params.tile_begin = tile_begin;
    params.tile_end = tile_end;
    params.rows = row_gradients();
    params.softcap = static_cast<float>(problem_.options.softcap);
    params.dtype = *KernelDtype(tiles.scalar_type());
    params.gradients = tiles.mutable_data_ptr();
    params.gradient_stride = tiles.stride(0);
    CheckLaunch(LaunchCachedGradients(params, c10::cuda::getCurrentCUDAStream()),
                "the gradient from cached exponentials");
  }

  void RebaseExponentials() {
    const c10::cuda::CUDAGuard on_device(row_gradients_.device());
    auto* const cache = rows_.cached.cache.mutable_data_ptr<uint8_t>();
    factors_ = at::empty({num_rows_, 1}, rows_.rows.hidden.options().dtype(at::kFloat));
    kernels::RebaseExponentialsParams params;
    params.num_rows = num_rows_;
    params.exponentials = reinterpret_cast<__nv_bfloat16*>(cache);
    params.exponents = reinterpret_cast<const int32_t*>(cache + layout_.exponents());
    params.row_tiles = layout_.row_tiles();
    params.exponent_stride = layout_.row_bytes() / static_cast<int64_t>(sizeof(int32_t));
    params.num_tiles = head_.num_tiles();
    params.rows = row_gradients();
    params.factors = factors_.mutable_data_ptr<float>();
    CheckLaunch(LaunchRebaseExponentials(params, c10::cuda::getCurrentCUDAStream()),
                "the rebasing of cached exponentials");
  }

  const RowGradient* row_gradients() const {
    return static_cast<const RowGradient*>(row_gradients_.const_data_ptr());
  }
  const uint8_t* cache() const { return rows_.cached.cache.const_data_ptr<uint8_t>(); }
  /// Row indices into the cache; null when the rows are those of the cache, in order.
  const int64_t* cached_rows() const {
    const at::Tensor& row_indices = rows_.cached.row_indices;
    return row_indices.defined() ? row_indices.const_data_ptr<int64_t>() : nullptr;
  }

  void ComputeRowGradients() {
    const c10::cuda::CUDAGuard on_device(row_gradients_.device());
    const RowArrays arrays(rows_.rows, problem_, head_);
    const UpstreamArrays upstream(rows_.upstream);
    const SavedOutputs& saved = rows_.saved;
    const at::Tensor lse = saved.lse.contiguous();
    const at::Tensor lse_rest = saved.lse_rest.contiguous();
    const at::Tensor entropy = saved.entropy.defined() ? saved.entropy.contiguous() : saved.entropy;
    kernels::RowGradientsParams params;
    params.num_rows = num_rows_;
    params.source = arrays.source();
    params.ignore_index = problem_.options.ignore_index;
    params.d_logprob = upstream.Of(&UpstreamGradients::logprob);
    params.d_entropy = upstream.Of(&UpstreamGradients::entropy);
    params.d_lse = upstream.Of(&UpstreamGradients::lse);
    params.d_mean_logit = upstream.Of(&UpstreamGradients::mean_logit);
    params.lse = Floats(lse);
    params.lse_rest = Floats(lse_rest);
    if (rows_.upstream.entropy.has_value()) params.entropy = Floats(entropy);
    params.gradient_per_log2_scale = head_.gradient_per_log2_scale();
    if (uses_cache()) {
      params.cached_rows = cached_rows();
      params.cached_row_bytes = layout_.row_bytes();
      if (problem_.options.memory.keep_logits == LogitCacheKind::kExponentials) {
        params.max_keys = reinterpret_cast<const uint64_t*>(cache() + layout_.max_key());
      }
      params.target_logits = reinterpret_cast<const float*>(cache() + layout_.target_logit());
    }
    params.rows = static_cast<RowGradient*>(row_gradients_.mutable_data_ptr());
    CheckLaunch(LaunchRowGradients(params, c10::cuda::getCurrentCUDAStream()),
                "the kernel of row gradients");
  }

  /// Adds the sums over the rows to the gradient of the bias. The gradient of the dot products has
  /// the scale as a factor, which the gradient of the bias does not have.
  void AddBias(const at::Tensor& gradient, Columns columns) const {
    if (!bias_sum_.defined()) return;
    at::Tensor sum = gradient.sum(0, /*keepdim=*/false, at::kFloat);
    bias_sum_.narrow(0, columns.begin, columns.size()).add_(sum, 1 / problem_.options.scale);
  }

  const BackwardRows& rows_;
  const Problem& problem_;
  const at::Tensor bias_sum_;  // [V] or undefined
  const int64_t column_bytes_beside_;
  const CachedRowLayout<int64_t> layout_;
  const FusedHead head_;
  std::optional<FusedRows> hidden_;             // absent if the products are not recomputed
  std::shared_ptr<PendingCompaction> pending_;  // null when num_rows_ is known
  int64_t num_rows_;               // number of all rows while the compaction is pending
  at::Tensor mean_logit_weights_;  // fp32 [tiles * 192] or undefined
  at::Tensor row_gradients_;       // RowGradient [n]
  at::Tensor buffer_;              // gradients of a block of columns; undefined if in place
  at::Tensor factors_;             // fp32 [n, 1] or undefined
};

/// Whether the kernels support this gradient. With a scale of 0 the bias's gradient could not be
/// derived from that of the dot products.
bool IsGradientSupported(const UpstreamGradients& upstream, const Problem& problem) {
  return problem.options.scale != 0 && problem.shard.columns > 0 &&
         UpstreamArrays(upstream).AreFp32On(problem.device());
}

}  // namespace

bool FusedPath::DifferentiatesDuringCompaction(const UpstreamGradients& upstream,
                                               const Problem& problem) const {
  return problem.num_rows() > 0 && problem.num_rows() <= kCompactionRowsMax &&
         !IsPartlyCached(problem) && IsGradientSupported(upstream, problem);
}

std::unique_ptr<DotGradients> FusedPath::MakeDotGradients(
    const DotGradientsArguments& arguments) const {
  if (!IsGradientSupported(arguments.rows.upstream, arguments.problem)) {
    return GetTensorPath().MakeDotGradients(arguments);
  }
  return std::make_unique<FusedDotGradients>(arguments);
}

}  // namespace logprobd::torch_ops
