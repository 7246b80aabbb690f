// Scores by the fused kernels: partials of tiles -> scores; over ranks by the exact sums of
// kernels/combine/shard_sums.h in between.

#include "kernels/torch_ops/fused_forward.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "kernels/combine/row_scores.h"
#include "kernels/combine/shard_sums.h"
#include "kernels/common/tile.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "kernels/row_ops/row_constants.h"
#include "kernels/torch_ops/device_arrays.h"
#include "kernels/torch_ops/fused_head.h"
#include "kernels/torch_ops/kept_row.h"
#include "kernels/torch_ops/mean_logit.h"

namespace logprobd::torch_ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using kernels::PartialLayout;
using kernels::RowNormalizer;
using kernels::TileSums;

/// Device memory of a block of rows, all in one piece: for few rows allocations are what takes
/// time.
struct Memory {
  at::Tensor bytes;
  float* log2_scales;
  int32_t* target_columns;  ///< -1 where another shard has the target.
  float* target_logit;      ///< 0 where another shard has the target.
  uint64_t* max_keys;       ///< LogitKeys; null unless needed.
  TileSums* partials;       ///< n x tiles
  TileSums* levels;         ///< [n], of the first tile; null unless needed.
  RowNormalizer* normalizers;
  uint8_t* nonfinite;
  PartialLayout layout;

  /// [n] of these.
  template <typename T>
  at::Tensor Values(const T* begin, int64_t num_rows, at::ScalarType dtype) const {
    const auto* const values = reinterpret_cast<const uint8_t*>(begin);
    const int64_t place = values - bytes.const_data_ptr<uint8_t>();
    return bytes.narrow(0, place, num_rows * static_cast<int64_t>(sizeof(T))).view(dtype);
  }
};

/// What ScoresParams lets be written of a block, and the largest logit of this shard.
struct Written {
  LinearLogprobOutputs scores;
  at::Tensor max_logit;
};

template <typename T>
T* As(const at::Tensor& bytes) {
  return static_cast<T*>(bytes.mutable_data_ptr());
}

Memory Allocate(int64_t num_rows, int64_t num_tiles, const at::TensorOptions& options,
                const LinearLogprobOptions& asked) {
  // Gradients that are linear in the exponentials do without the largest logit in fp32.
  const bool needs_levels = asked.keep_logits == KeptLogits::kRebasedExponentials;
  const bool needs_largest = asked.need_argmax || asked.keep_logits == KeptLogits::kExponentials;
  constexpr int64_t kAlignment = 16;
  int64_t size = 0;
  const auto place = [&](size_t row_bytes) {
    const int64_t begin = size;
    const int64_t bytes = num_rows * static_cast<int64_t>(row_bytes);
    size += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return begin;
  };
  const int64_t log2_scales = place(sizeof(float));
  const int64_t target_columns = place(sizeof(int32_t));
  const int64_t target_logit = place(sizeof(float));
  const int64_t max_keys = place(needs_largest ? sizeof(uint64_t) : 0);
  const int64_t partials = place(static_cast<size_t>(num_tiles) * sizeof(TileSums));
  const int64_t levels = place(needs_levels ? sizeof(TileSums) : 0);
  const int64_t normalizers = place(sizeof(RowNormalizer));
  const int64_t nonfinite = place(sizeof(uint8_t));
  Memory memory;
  memory.bytes = at::empty({size}, options.dtype(at::kByte));
  auto* const begin = memory.bytes.mutable_data_ptr<uint8_t>();
  memory.log2_scales = reinterpret_cast<float*>(begin + log2_scales);
  memory.target_columns = reinterpret_cast<int32_t*>(begin + target_columns);
  memory.target_logit = reinterpret_cast<float*>(begin + target_logit);
  memory.max_keys = needs_largest ? reinterpret_cast<uint64_t*>(begin + max_keys) : nullptr;
  memory.partials = reinterpret_cast<TileSums*>(begin + partials);
  memory.levels = needs_levels ? reinterpret_cast<TileSums*>(begin + levels) : nullptr;
  memory.normalizers = reinterpret_cast<RowNormalizer*>(begin + normalizers);
  memory.nonfinite = begin + nonfinite;
  memory.layout = kernels::PartialLayoutOf(num_rows, num_tiles);
  return memory;
}

void MakeOperands(int64_t num_rows, const RowArrays& arrays, const Memory& memory,
                  cudaStream_t stream) {
  kernels::RowOperandsParams params;
  params.num_rows = num_rows;
  params.source = arrays.source();
  params.log2_scales = memory.log2_scales;
  params.target_columns = memory.target_columns;
  params.target_logits = memory.target_logit;
  params.max_keys = memory.max_keys;
  CheckLaunch(LaunchRowOperands(params, stream), "the rows' operands");
}

/// The sums of the first tile, whose exponents are near those of the other tiles.
void MakeLevels(const Rows& rows, const FusedHead& head, const Memory& memory,
                cudaStream_t stream) {
  kernels::FusedPartialsParams params = head.Params(0, 1);
  if (rows.search != nullptr) params.row_count = rows.search->count();
  params.log2_scales = memory.log2_scales;
  params.targets = memory.target_columns;
  params.layout = {.row_stride = 1, .tile_stride = params.num_rows};
  params.sums = memory.levels;
  params.target_logits = memory.target_logit;
  CheckLaunch(LaunchFusedPartials(params, stream), "the fused kernel on one tile");
}

void MakePartials(const Rows& rows, const FusedHead& head, const Memory& memory,
                  const at::Tensor& cache, int64_t weight_rows, cudaStream_t stream) {
  kernels::FusedPartialsParams params = head.Params(0, head.num_tiles());
  if (rows.search != nullptr) params.row_count = rows.search->count();
  params.log2_scales = memory.log2_scales;
  params.targets = memory.target_columns;
  params.layout = memory.layout;
  params.sums = memory.partials;
  params.target_logits = memory.target_logit;
  params.max_keys = memory.max_keys;
  if (!cache.defined()) return CheckLaunch(LaunchFusedPartials(params, stream), "the fused kernel");
  if (memory.levels != nullptr) MakeLevels(rows, head, memory, stream);
  const KeptRow<int64_t> kept = KeptRowOf(weight_rows);
  auto* const bytes = As<uint8_t>(cache);
  params.exponentials.values = reinterpret_cast<__nv_bfloat16*>(bytes);
  params.exponentials.exponents = reinterpret_cast<int32_t*>(bytes + kept.exponents());
  params.exponentials.row_tiles = kept.row_tiles();
  params.exponentials.exponent_stride = kept.row_bytes() / static_cast<int64_t>(sizeof(int32_t));
  params.exponentials.reference_sums = memory.levels;
  CheckLaunch(LaunchFusedPartials(params, stream), "the fused kernel");
  const auto keep = [&](const auto* values, int64_t place) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(*values));
    const at::Tensor words = memory.Values(values, rows.size(), at::kByte);
    cache.narrow(1, place, kBytes).copy_(words.view({-1, kBytes}));
  };
  if (memory.levels == nullptr) keep(memory.max_keys, kept.max_key());
  keep(memory.target_logit, kept.target_logit());
}

/// Where the scores of the first `num_rows` go, all but the partials.
kernels::RowScoresParams ScoresParams(int64_t num_rows, const Memory& memory,
                                      const LinearLogprobOptions& options, int64_t vocab_size,
                                      Written& written) {
  const auto fp32 = memory.bytes.options().dtype(at::kFloat);
  const auto floats = [&] { return at::empty({num_rows}, fp32); };
  kernels::RowScoresParams params;
  params.num_rows = num_rows;
  params.vocab_size = vocab_size;
  params.layout = memory.layout;
  params.log2_scales = memory.log2_scales;
  params.target_logits = memory.target_logit;
  params.normalizers = memory.normalizers;
  params.nonfinite = memory.nonfinite;
  params.logprob = As<float>(written.scores.logprob = floats());
  params.lse = As<float>(written.scores.lse = floats());
  params.lse_rest = As<float>(written.scores.lse_rest = floats());
  if (options.need_entropy) params.entropy = As<float>(written.scores.entropy = floats());
  if (options.need_argmax) {
    written.scores.argmax = at::empty({num_rows}, fp32.dtype(at::kInt));
    params.max_keys = memory.max_keys;
    params.argmax_id = As<int32_t>(written.scores.argmax);
    params.max_logit = As<float>(written.max_logit = floats());
  }
  return params;
}

/// Joins the shards' sums; every rank gets the same bits. Returns how many ranks have each target.
at::Tensor JoinShards(const Memory& memory, int64_t num_tiles,
                      const kernels::RowScoresParams& scores, const RankGroup& group,
                      cudaStream_t stream) {
  const auto integers = memory.bytes.options().dtype(at::kLong);
  const int64_t num_rows = scores.num_rows;
  at::Tensor exponents = at::full({num_rows}, kernels::kEmptyExponent, integers.dtype(at::kInt));
  at::Tensor sums = at::zeros({4, num_rows}, integers);
  kernels::ShardSumsParams params;
  params.num_rows = num_rows;
  params.num_tiles = num_tiles;
  params.layout = memory.layout;
  params.sums = memory.partials;
  params.exponents = As<int32_t>(exponents);
  params.row_sums = As<int64_t>(sums);
  if (num_tiles > 0) CheckLaunch(LaunchShardExponents(params, stream), "the exponents of a shard");
  group.Max(exponents);
  if (num_tiles > 0) CheckLaunch(LaunchShardSums(params, stream), "the sums of a shard");
  // The target's bits come from its only owner, so that their sum is exact as well.
  at::Tensor target_logit = memory.Values(memory.target_logit, num_rows, at::kInt);
  sums[2].copy_(target_logit);
  sums[3].copy_(memory.Values(memory.target_columns, num_rows, at::kInt) >= 0);
  group.Sum(sums);
  target_logit.copy_(sums[2]);
  kernels::ShardScoresParams joined;
  joined.scores = scores;
  joined.exponents = params.exponents;
  joined.row_sums = params.row_sums;
  CheckLaunch(LaunchShardScores(joined, stream), "the scores");
  return sums[3];
}

/// The id of the largest logit over the ranks; this rank's are columns of its shard.
at::Tensor ArgmaxOverRanks(const Written& written, const Shard& shard, const RankGroup& group) {
  constexpr int64_t kNoColumn = std::numeric_limits<int64_t>::max();
  const at::Tensor id = written.scores.argmax.to(at::kLong);
  if (group.is_alone()) return at::where(id >= 0, id + shard.begin, id);
  // NaN where the row is, on all ranks alike; an empty shard's key is NaN too.
  const at::Tensor mine = written.max_logit.nan_to_num(-kInfinity, kInfinity, -kInfinity);
  at::Tensor largest = mine.clone();
  group.Max(largest);
  at::Tensor first = at::where(mine == largest, id + shard.begin, kNoColumn);
  if (shard.columns == 0) first.fill_(kNoColumn);
  group.Min(first);
  return first.masked_fill_(written.scores.lse.isnan(), -1);
}

class FusedScores : public PendingScores {
 public:
  FusedScores(const Rows& rows, const LinearLogprobInputs& inputs,
              const LinearLogprobOptions& options, const Shard& shard, const at::Tensor& cache)
      : rows_(rows),
        inputs_(inputs),
        options_(options),
        num_tiles_(kernels::NumTiles(shard.columns)),
        are_logits_kept_(cache.defined()),
        memory_(Allocate(rows.size(), num_tiles_, inputs.hidden.options(), options)) {
    const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    const FusedHead head(rows.hidden, inputs, options, shard);
    const RowArrays arrays(rows, inputs, options, shard, head);
    MakeOperands(rows.size(), arrays, memory_, stream);
    if (num_tiles_ > 0) MakePartials(rows, head, memory_, cache, inputs.weight.size(0), stream);
  }

  LinearLogprobOutputs Join(bool are_owned, const Shard& shard, const RankGroup& group) override {
    const c10::cuda::CUDAGuard on_device(inputs_.hidden.device());
    const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    // Not before the partials are enqueued: they run while the host waits for the number of rows.
    const Rows found = rows_.Resolved();
    if (rows_.search != nullptr) {
      CheckOwned(rows_.search->Result(), rows_.all_targets, options_, shard.vocab_size);
    }
    Written written;
    kernels::RowScoresParams params =
        ScoresParams(found.size(), memory_, options_, shard.vocab_size, written);
    LinearLogprobOutputs& scores = written.scores;
    if (group.is_alone() && num_tiles_ > 0) {
      params.num_tiles = num_tiles_;
      params.sums = memory_.partials;
      params.follows_partials = !are_logits_kept_;
      CheckLaunch(LaunchRowScores(params, stream), "the scores");
      if (found.num_out_of_vocab > 0 || found.are_unchecked) {
        const double unowned =
            options_.out_of_vocab_is_zero ? 0 : std::numeric_limits<double>::quiet_NaN();
        const at::Tensor columns = memory_.Values(memory_.target_columns, found.size(), at::kInt);
        scores.logprob = at::where(columns >= 0, scores.logprob, unowned);
      }
    } else {
      const at::Tensor owners = JoinShards(memory_, num_tiles_, params, group, stream);
      if (!are_owned) {
        CheckOwners(found, owners, inputs_, options_, shard.vocab_size);
        if (options_.out_of_vocab_is_zero)
          scores.logprob = at::where(owners > 0, scores.logprob, 0);
      }
    }
    if (options_.need_argmax) scores.argmax = ArgmaxOverRanks(written, shard, group);
    if (options_.need_mean_logit) {
      scores.mean_logit = MeanLogit(found, inputs_, options_, shard, group);
    }
    return scores;
  }

 private:
  const Rows rows_;
  const LinearLogprobInputs& inputs_;
  const LinearLogprobOptions& options_;
  const int64_t num_tiles_;
  const bool are_logits_kept_;
  const Memory memory_;
};

}  // namespace

bool HasFusedKernels() { return kernels::HasFusedKernel(); }

bool IsForwardFused(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  const bool caches_exponentials = options.keep_logits == KeptLogits::kExponentials ||
                                   options.keep_logits == KeptLogits::kRebasedExponentials;
  TORCH_CHECK_VALUE(!caches_exponentials || IsFused(inputs),
                    "keep_logits is 2: the fused kernels do not take these inputs");
  return options.keep_logits != KeptLogits::kWide && IsFused(inputs);
}

void ReserveFusedRoom(int64_t num_rows, const LinearLogprobInputs& inputs,
                      const LinearLogprobOptions& options) {
  const c10::cuda::CUDAGuard on_device(inputs.hidden.device());
  Allocate(std::min(num_rows, kFusedBlockRows), kernels::NumTiles(inputs.weight.size(0)),
           inputs.hidden.options(), options);
}

bool AreScoredWhileSearched(const LinearLogprobInputs& inputs,
                            const LinearLogprobOptions& options) {
  const int64_t num_rows = inputs.target.numel();
  return options.group.empty() && num_rows > 0 && num_rows <= kSearchedRowsMax &&
         IsForwardFused(inputs, options);
}

std::unique_ptr<PendingScores> BeginFusedScores(const Rows& rows, const LinearLogprobInputs& inputs,
                                                const LinearLogprobOptions& options,
                                                const Shard& shard, const at::Tensor& cache) {
  const c10::cuda::CUDAGuard on_device(inputs.hidden.device());
  return std::make_unique<FusedScores>(rows, inputs, options, shard, cache);
}

}  // namespace logprobd::torch_ops
