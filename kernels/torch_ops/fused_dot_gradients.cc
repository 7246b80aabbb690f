#include "kernels/torch_ops/fused_dot_gradients.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/common/row_gradient.h"
#include "kernels/common/tile.h"
#include "kernels/fused_sm90/fused_gradient.h"
#include "kernels/row_ops/cached_gradients.h"
#include "kernels/row_ops/rebase_exponentials.h"
#include "kernels/row_ops/row_constants.h"
#include "kernels/torch_ops/device_arrays.h"
#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/fused_head.h"
#include "kernels/torch_ops/kept_row.h"

namespace logprobd::torch_ops {
namespace {

using kernels::kTileColumns;
using kernels::RowGradient;

/// Bytes of a block of columns' gradients, beside those that the hidden states' gradient will take
/// in its own dtype when this is gone: as many as leave the operator's extra memory below 256 MiB.
/// Larger blocks are added to the hidden states' sum less often.
constexpr int64_t kGradientBytesMax = int64_t{208} << 20;

/// Bytes of a block where hidden states are gathered beside it: these take what their gradient
/// will, so that the block is the extra memory, with up to 6 MiB of what is kept for each row.
constexpr int64_t kBesideGatheredMax = int64_t{250} << 20;

/// Blocks are whole multiples of so many tiles: of the groups that the fused kernel takes together
/// (kernels/fused_sm90/fused_choice.h), and of what the products' own tiles divide well. Measured:
/// 40 tiles at hidden size 2,048 cost a tenth more than 32.
constexpr int64_t kTileGroup = 16;

class FusedDotGradients : public DotGradients {
 public:
  explicit FusedDotGradients(const DotGradientsArguments& arguments)
      : arguments_(arguments),
        head_(arguments.rows.rows.hidden, arguments.inputs, arguments.options, arguments.shard),
        search_(arguments.rows.rows.search),
        num_rows_(arguments.rows.rows.size()) {
    const auto& hidden = arguments_.rows.rows.hidden;
    if (arguments_.rows.upstream.mean_logit.has_value()) {
      const Columns all = {0, arguments_.shard.columns};
      mean_logit_weights_ =
          PaddedToTiles(arguments_.shard.MeanLogitWeights(arguments_.inputs, all), all.size());
    }
    rows_ = at::empty({num_rows_ * static_cast<int64_t>(sizeof(RowGradient))},
                      hidden.options().dtype(at::kByte));
    MakeRows();
    if (are_exponentials_rebased()) RebaseExponentials();
    if (!is_in_place()) {
      room_ = at::empty({RoomSize()}, hidden.options());
    }
  }

  Columns Next(int64_t begin) const override {
    const int64_t columns = arguments_.shard.columns;
    if (is_in_place()) return {begin, columns};
    const int64_t tiles = WholeGroups(room_.size(0) / (num_rows_ * kTileColumns));
    return {begin, std::min(begin + tiles * kTileColumns, columns)};
  }

  at::Tensor Of(Columns columns) override {
    const c10::cuda::CUDAGuard on_device(rows_.device());
    const int64_t tile_begin = columns.begin / kTileColumns;
    const int64_t tile_end = tile_begin + kernels::NumTiles(columns.size());
    const at::Tensor place = RowIndexOf(tile_end - tile_begin);
    if (uses_kept()) {
      if (!are_exponentials_rebased()) TakeKept(tile_begin, tile_end, place);
    } else {
      Recompute(tile_begin, tile_end, place);
    }
    // Not before the kernel is enqueued: it runs while the host waits for the number of rows.
    if (search_ != nullptr) num_rows_ = std::exchange(search_, nullptr)->Result().size(num_rows_);
    at::Tensor gradient = place.narrow(0, 0, num_rows_).narrow(1, 0, columns.size());
    AddBias(gradient, columns);
    return gradient;
  }

  at::Tensor RowFactors() const override { return factors_; }

 private:
  const int64_t* row_count() const { return search_ == nullptr ? nullptr : search_->count(); }

  int64_t WholeGroups(int64_t tiles) const {
    const int64_t groups = tiles >= kTileGroup ? tiles / kTileGroup * kTileGroup : tiles;
    return std::clamp<int64_t>(groups, 1, head_.num_tiles());
  }

  /// Elements for a block of columns.
  int64_t RoomSize() const {
    const int64_t tile_size = num_rows_ * kTileColumns;
    const auto later_bytes = static_cast<int64_t>(arguments_.rows.rows.hidden.nbytes());
    int64_t bytes = kGradientBytesMax + later_bytes;
    // Rows of a search were gathered, into as many bytes.
    if (search_ != nullptr) bytes = std::min(bytes, kBesideGatheredMax);
    return WholeGroups(bytes / (2 * tile_size)) * tile_size;
  }

  /// What was kept has no part of columns whose probability is 0, which a mean's gradient has.
  bool uses_kept() const {
    return arguments_.rows.cached.cache.defined() &&
           !arguments_.rows.upstream.mean_logit.has_value();
  }

  /// Powers make room for gradients, which are as large, where each row's are its own.
  bool is_in_place() const {
    return uses_kept() && arguments_.rows.saved.is_cache_spent && kept_places() == nullptr;
  }

  /// Powers become gradients, but for a factor, by next to nothing.
  bool are_exponentials_rebased() const {
    return is_in_place() && arguments_.options.keep_logits == KeptLogits::kRebasedExponentials;
  }

  /// [n, 192 a tile], where a block's gradients go.
  at::Tensor RowIndexOf(int64_t tiles) const {
    const int64_t columns = tiles * kTileColumns;
    if (!is_in_place()) {
      return room_.as_strided({num_rows_, columns}, {columns, 1});
    }
    const at::ScalarType dtype = arguments_.rows.rows.hidden.scalar_type();
    return arguments_.rows.cached.cache.narrow(0, 0, num_rows_).view(dtype).narrow(1, 0, columns);
  }

  void Recompute(int64_t tile_begin, int64_t tile_end, const at::Tensor& place) const {
    kernels::FusedGradientParams params;
    params.head = head_.Params(tile_begin, tile_end);
    params.head.num_rows = num_rows_;
    params.head.row_count = row_count();
    params.rows = static_cast<const RowGradient*>(rows_.const_data_ptr());
    params.mean_logit_weights = Floats(mean_logit_weights_);
    params.gradients = place.mutable_data_ptr();
    params.gradient_stride = place.stride(0);
    CheckLaunch(LaunchFusedGradient(params, at::cuda::getCurrentCUDAStream()),
                "the fused gradient");
  }

  void TakeKept(int64_t tile_begin, int64_t tile_end, const at::Tensor& place) const {
    const KeptRow<int64_t> layout = kept_layout();
    kernels::CachedGradientsParams params;
    params.num_rows = num_rows_;
    params.row_count = row_count();
    params.cached_rows = kept_places();
    params.exponentials = reinterpret_cast<const __nv_bfloat16*>(kept());
    params.exponents = reinterpret_cast<const int32_t*>(kept() + layout.exponents());
    params.row_tiles = layout.row_tiles();
    params.exponent_stride = layout.row_bytes() / static_cast<int64_t>(sizeof(int32_t));
    params.tile_begin = tile_begin;
    params.tile_end = tile_end;
    params.rows = static_cast<const RowGradient*>(rows_.const_data_ptr());
    params.softcap = static_cast<float>(arguments_.options.softcap);
    params.dtype =
        place.scalar_type() == at::kBFloat16 ? kernels::Dtype::kBf16 : kernels::Dtype::kF16;
    params.gradients = place.mutable_data_ptr();
    params.gradient_stride = place.stride(0);
    CheckLaunch(LaunchCachedGradients(params, at::cuda::getCurrentCUDAStream()),
                "the gradient of kept logits");
  }

  void RebaseExponentials() {
    const KeptRow<int64_t> layout = kept_layout();
    auto* const kept = arguments_.rows.cached.cache.mutable_data_ptr<uint8_t>();
    factors_ = at::empty({num_rows_, 1}, arguments_.rows.rows.hidden.options().dtype(at::kFloat));
    kernels::RebaseExponentialsParams params;
    params.num_rows = num_rows_;
    params.exponentials = reinterpret_cast<__nv_bfloat16*>(kept);
    params.exponents = reinterpret_cast<const int32_t*>(kept + layout.exponents());
    params.row_tiles = layout.row_tiles();
    params.exponent_stride = layout.row_bytes() / static_cast<int64_t>(sizeof(int32_t));
    params.num_tiles = head_.num_tiles();
    params.rows = static_cast<const RowGradient*>(rows_.const_data_ptr());
    params.factors = factors_.mutable_data_ptr<float>();
    CheckLaunch(LaunchRebaseExponentials(params, at::cuda::getCurrentCUDAStream()),
                "the leveling of kept exponentials");
  }

  KeptRow<int64_t> kept_layout() const { return KeptRowOf(arguments_.inputs.weight.size(0)); }
  const uint8_t* kept() const { return arguments_.rows.cached.cache.const_data_ptr<uint8_t>(); }
  const int64_t* kept_places() const {
    const at::Tensor& index = arguments_.rows.cached.index;
    return index.defined() ? index.const_data_ptr<int64_t>() : nullptr;
  }

  void MakeRows() {
    const c10::cuda::CUDAGuard on_device(rows_.device());
    const RowArrays arrays(arguments_.rows.rows, arguments_.inputs, arguments_.options,
                           arguments_.shard, head_);
    const UpstreamArrays upstream(arguments_.rows.upstream);
    const SavedOutputs& saved = arguments_.rows.saved;
    const at::Tensor lse = saved.lse.contiguous();
    const at::Tensor lse_rest = saved.lse_rest.contiguous();
    const at::Tensor entropy = saved.entropy.defined() ? saved.entropy.contiguous() : saved.entropy;
    kernels::RowGradientsParams params;
    params.num_rows = num_rows_;
    params.source = arrays.source();
    params.ignore_index = arguments_.options.ignore_index;
    params.d_logprob = upstream.logprob();
    params.d_entropy = upstream.entropy();
    params.d_lse = upstream.lse();
    params.d_mean_logit = upstream.mean_logit();
    params.lse = Floats(lse);
    params.lse_rest = Floats(lse_rest);
    if (arguments_.rows.upstream.entropy.has_value()) params.entropy = Floats(entropy);
    params.gradient_per_log2_scale = head_.gradient_per_log2_scale();
    if (uses_kept()) {
      const KeptRow<int64_t> layout = kept_layout();
      params.cached_rows = kept_places();
      params.cached_row_bytes = layout.row_bytes();
      if (arguments_.options.keep_logits == KeptLogits::kExponentials) {
        params.max_keys = reinterpret_cast<const uint64_t*>(kept() + layout.max_key());
      }
      params.target_logits = reinterpret_cast<const float*>(kept() + layout.target_logit());
    }
    params.rows = static_cast<RowGradient*>(rows_.mutable_data_ptr());
    CheckLaunch(LaunchRowGradients(params, at::cuda::getCurrentCUDAStream()),
                "the rows' gradients");
  }

  /// What a bias gets is what the dot products get, before the scale.
  void AddBias(const at::Tensor& gradient, Columns columns) const {
    if (!arguments_.bias_sum.defined()) return;
    at::Tensor sum = gradient.sum(0, /*keepdim=*/false, at::kFloat);
    arguments_.bias_sum.narrow(0, columns.begin, columns.size())
        .add_(sum, 1 / arguments_.options.scale);
  }

  const DotGradientsArguments arguments_;
  const FusedHead head_;
  std::shared_ptr<RowCompaction> search_;  // null where num_rows_ is known
  int64_t num_rows_;                       // until then that of all places
  at::Tensor mean_logit_weights_;          // fp32 [tiles * 192] or undefined
  at::Tensor rows_;                        // RowGradient [n]
  at::Tensor room_;                        // a block's gradients
  at::Tensor factors_;                     // fp32 [n, 1] or undefined
};

bool AreFused(const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
              const LinearLogprobOptions& options, const Shard& shard) {
  // A scale of 0 takes the bias's gradient with it.
  return IsFused(inputs) && options.scale != 0 && shard.columns > 0 &&
         UpstreamArrays(upstream).AreFp32On(inputs.hidden.device());
}

}  // namespace

bool AreDifferentiatedWhileSearched(const UpstreamGradients& upstream,
                                    const LinearLogprobInputs& inputs,
                                    const LinearLogprobOptions& options, const Shard& shard) {
  const int64_t num_rows = inputs.target.numel();
  return num_rows > 0 && num_rows <= kSearchedRowsMax && options.keep_logits != KeptLogits::kWide &&
         AreFused(upstream, inputs, options, shard);
}

std::unique_ptr<DotGradients> MakeFusedDotGradients(const DotGradientsArguments& arguments) {
  const auto& [rows, inputs, options, shard, bias_sum] = arguments;
  if (rows.cached.has_logits() || !AreFused(rows.upstream, inputs, options, shard)) return nullptr;
  return std::make_unique<FusedDotGradients>(arguments);
}

}  // namespace logprobd::torch_ops
