// Computes scores with the fused kernels: first the partials of tiles, then the scores. In a group
// of ranks, the exact sums of kernels/combine/shard_sums.h are computed in between.

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/combine/row_scores.h"
#include "kernels/combine/shard_sums.h"
#include "kernels/common/tile.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "kernels/row_ops/row_constants.h"
#include "kernels/torch_ops/paths/fused_path.h"
#include "kernels/torch_ops/paths/kernel_arrays.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/logits.h"

namespace logprobd::torch_ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using kernels::PartialLayout;
using kernels::RowNormalizer;
using kernels::TileSums;

template <typename T>
T* PointerTo(const at::Tensor& bytes) {
  return static_cast<T*>(bytes.mutable_data_ptr());
}

// Device memory.

/// Device memory of a block of n rows. All arrays share one allocation, since with few rows
/// allocations take most of the time.
struct Memory {
  at::Tensor bytes;
  float* log2_scales;
  int32_t* target_columns;   ///< -1 when another shard has the target.
  float* target_logits;      ///< 0 when another shard has the target.
  uint64_t* max_keys;        ///< LogitKeys; null unless needed.
  TileSums* partials;        ///< [n, tiles], as `layout` says.
  TileSums* reference_sums;  ///< [n], sums of the first tile; null unless needed.
  RowNormalizer* normalizers;
  uint8_t* nonfinite;
  PartialLayout layout;

  /// Returns the [n] values at `begin` as a tensor.
  template <typename T>
  at::Tensor Values(const T* begin, int64_t num_rows, at::ScalarType dtype) const {
    const auto* const values = reinterpret_cast<const uint8_t*>(begin);
    const int64_t offset = values - bytes.const_data_ptr<uint8_t>();
    return bytes.narrow(0, offset, num_rows * static_cast<int64_t>(sizeof(T))).view(dtype);
  }
};

Memory Allocate(int64_t num_rows, int64_t num_tiles, const Problem& problem) {
  const LinearLogprobOptions& options = problem.options;
  const bool needs_reference = options.keep_logits == LogitCacheKind::kRebasedExponentials;
  // Gradients that are linear in the exponentials do not need the largest logit in fp32.
  const bool needs_max =
      options.need_argmax || options.keep_logits == LogitCacheKind::kExponentials;
  constexpr int64_t kAlignment = 16;
  int64_t size = 0;
  const auto reserve = [&](size_t row_bytes) {
    const int64_t begin = size;
    const int64_t bytes = num_rows * static_cast<int64_t>(row_bytes);
    size += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return begin;
  };
  const int64_t log2_scales = reserve(sizeof(float));
  const int64_t target_columns = reserve(sizeof(int32_t));
  const int64_t target_logits = reserve(sizeof(float));
  const int64_t max_keys = reserve(needs_max ? sizeof(uint64_t) : 0);
  const int64_t partials = reserve(static_cast<size_t>(num_tiles) * sizeof(TileSums));
  const int64_t reference_sums = reserve(needs_reference ? sizeof(TileSums) : 0);
  const int64_t normalizers = reserve(sizeof(RowNormalizer));
  const int64_t nonfinite = reserve(sizeof(uint8_t));
  Memory memory;
  memory.bytes = at::empty({size}, problem.inputs.hidden.options().dtype(at::kByte));
  auto* const begin = memory.bytes.mutable_data_ptr<uint8_t>();
  memory.log2_scales = reinterpret_cast<float*>(begin + log2_scales);
  memory.target_columns = reinterpret_cast<int32_t*>(begin + target_columns);
  memory.target_logits = reinterpret_cast<float*>(begin + target_logits);
  memory.max_keys = needs_max ? reinterpret_cast<uint64_t*>(begin + max_keys) : nullptr;
  memory.partials = reinterpret_cast<TileSums*>(begin + partials);
  memory.reference_sums =
      needs_reference ? reinterpret_cast<TileSums*>(begin + reference_sums) : nullptr;
  memory.normalizers = reinterpret_cast<RowNormalizer*>(begin + normalizers);
  memory.nonfinite = begin + nonfinite;
  memory.layout = kernels::PartialLayoutOf(num_rows, num_tiles);
  return memory;
}

// Partials.

void ComputeOperands(int64_t num_rows, const RowArrays& arrays, const Memory& memory,
                     cudaStream_t stream) {
  kernels::RowOperandsParams params;
  params.num_rows = num_rows;
  params.source = arrays.source();
  params.log2_scales = memory.log2_scales;
  params.target_columns = memory.target_columns;
  params.target_logits = memory.target_logits;
  params.max_keys = memory.max_keys;
  CheckLaunch(LaunchRowOperands(params, stream), "the kernel of row operands");
}

/// The operands of a block of rows.
struct Operands {
  const FusedRows& hidden;
  const FusedHead& head;
};

/// Rows [begin, begin + size) of a block.
struct PartOfRows {
  int64_t begin;
  int64_t size;
  const int64_t* row_count;  ///< FusedPartialsParams::row_count; not null only if all rows.
};

/// Returns the parameters of the fused kernel for tiles [0, tile_end) of some rows.
kernels::FusedPartialsParams PartialsParams(const PartOfRows& part, const Operands& operands,
                                            int64_t tile_end, const Memory& memory) {
  kernels::FusedPartialsParams params =
      operands.head.Params(operands.hidden.Slice(part.begin, part.size), 0, tile_end);
  params.row_count = part.row_count;
  params.log2_scales = memory.log2_scales + part.begin;
  params.targets = memory.target_columns + part.begin;
  params.target_logits = memory.target_logits + part.begin;
  return params;
}

/// Returns the parameters for the partials of all tiles of some rows.
kernels::FusedPartialsParams AllPartialsParams(const PartOfRows& part, const Operands& operands,
                                               const Memory& memory) {
  kernels::FusedPartialsParams params =
      PartialsParams(part, operands, operands.head.num_tiles(), memory);
  params.layout = memory.layout;
  params.sums = memory.partials + part.begin * memory.layout.row_stride;
  if (memory.max_keys != nullptr) params.max_keys = memory.max_keys + part.begin;
  return params;
}

/// Computes the sums of the first tile, whose exponents are near those of the other tiles.
void ComputeReferenceSums(const PartOfRows& part, const Operands& operands, const Memory& memory,
                          cudaStream_t stream) {
  kernels::FusedPartialsParams params = PartialsParams(part, operands, 1, memory);
  params.layout = {.row_stride = 1, .tile_stride = params.num_rows};
  params.sums = memory.reference_sums;
  CheckLaunch(LaunchFusedPartials(params, stream), "the fused kernel for one tile");
}

/// Computes the partials of all tiles for the block's first rows, and writes the rows'
/// exponentials, largest logit and target's logit to `cache`, which has all of these rows.
void ComputeCachedPartials(const PartOfRows& part, const Operands& operands, const Memory& memory,
                           const at::Tensor& cache, int64_t weight_rows, cudaStream_t stream) {
  kernels::FusedPartialsParams params = AllPartialsParams(part, operands, memory);
  if (memory.reference_sums != nullptr) ComputeReferenceSums(part, operands, memory, stream);
  const CachedRowLayout<int64_t> layout(weight_rows);
  auto* const bytes = PointerTo<uint8_t>(cache);
  params.exponentials.values = reinterpret_cast<__nv_bfloat16*>(bytes);
  params.exponentials.exponents = reinterpret_cast<int32_t*>(bytes + layout.exponents());
  params.exponentials.row_tiles = layout.row_tiles();
  params.exponentials.exponent_stride = layout.row_bytes() / static_cast<int64_t>(sizeof(int32_t));
  params.exponentials.reference_sums = memory.reference_sums;
  CheckLaunch(LaunchFusedPartials(params, stream), "the fused kernel");
  const auto copy_to_cache = [&](const auto* values, int64_t offset) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(*values));
    const at::Tensor words = memory.Values(values, part.size, at::kByte);
    cache.narrow(1, offset, kBytes).copy_(words.view({-1, kBytes}));
  };
  if (memory.reference_sums == nullptr) copy_to_cache(memory.max_keys, layout.max_key());
  copy_to_cache(memory.target_logits, layout.target_logit());
}

/// Computes the partials of all tiles. `cache` has the block's first rows, or is undefined.
void ComputePartials(const Rows& rows, const Operands& operands, const Memory& memory,
                     const at::Tensor& cache, int64_t weight_rows, cudaStream_t stream) {
  const int64_t* const row_count = rows.pending == nullptr ? nullptr : rows.pending->count();
  const int64_t num_cached = cache.defined() ? cache.size(0) : 0;
  if (num_cached > 0) {
    ComputeCachedPartials({0, num_cached, row_count}, operands, memory, cache, weight_rows, stream);
  }
  const PartOfRows others = {num_cached, rows.size() - num_cached, row_count};
  if (others.size == 0) return;
  CheckLaunch(LaunchFusedPartials(AllPartialsParams(others, operands, memory), stream),
              "the fused kernel");
}

// Scores.

/// Scores of a block. The argmax is a column of this rank's shard.
struct BlockScores {
  LinearLogprobOutputs scores;
  at::Tensor max_logit;  ///< The largest logit of this shard; undefined unless needed.
};

/// Allocates the scores of the first `num_rows` rows. The caller sets the partials.
kernels::RowScoresParams ScoresParams(int64_t num_rows, const Memory& memory,
                                      const Problem& problem, BlockScores& block) {
  const LinearLogprobOptions& options = problem.options;
  const auto fp32 = memory.bytes.options().dtype(at::kFloat);
  const auto floats = [&] { return at::empty({num_rows}, fp32); };
  LinearLogprobOutputs& scores = block.scores;
  kernels::RowScoresParams params;
  params.num_rows = num_rows;
  params.vocab_size = problem.shard.vocab_size;
  params.layout = memory.layout;
  params.log2_scales = memory.log2_scales;
  params.target_logits = memory.target_logits;
  params.normalizers = memory.normalizers;
  params.nonfinite = memory.nonfinite;
  params.logprob = PointerTo<float>(scores.logprob = floats());
  params.lse = PointerTo<float>(scores.lse = floats());
  params.lse_rest = PointerTo<float>(scores.lse_rest = floats());
  if (options.need_entropy) params.entropy = PointerTo<float>(scores.entropy = floats());
  if (options.need_argmax) {
    scores.argmax = at::empty({num_rows}, fp32.dtype(at::kInt));
    params.max_keys = memory.max_keys;
    params.argmax_id = PointerTo<int32_t>(scores.argmax);
    params.max_logit = PointerTo<float>(block.max_logit = floats());
  }
  return params;
}

/// Combines the sums of all shards and computes the scores, with the same bits on every rank.
/// Returns the number of ranks that have each row's target.
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
  params.exponents = PointerTo<int32_t>(exponents);
  params.row_sums = PointerTo<int64_t>(sums);
  if (num_tiles > 0) CheckLaunch(LaunchShardExponents(params, stream), "the shard exponent kernel");
  group.Max(exponents);
  if (num_tiles > 0) CheckLaunch(LaunchShardSums(params, stream), "the shard sum kernel");
  // One rank has the target's logit and the others have 0, so the sum of the bits over all ranks is
  // exact as well.
  at::Tensor target_logits = memory.Values(memory.target_logits, num_rows, at::kInt);
  sums[2].copy_(target_logits);
  sums[3].copy_(memory.Values(memory.target_columns, num_rows, at::kInt) >= 0);
  group.Sum(sums);
  target_logits.copy_(sums[2]);
  kernels::ShardScoresParams joined;
  joined.scores = scores;
  joined.exponents = params.exponents;
  joined.row_sums = params.row_sums;
  CheckLaunch(LaunchShardScores(joined, stream), "the score kernel");
  return sums[3];
}

/// Returns the vocabulary id of the largest logit over all ranks.
at::Tensor ArgmaxOverRanks(const BlockScores& block, const Problem& problem) {
  constexpr int64_t kNoColumn = std::numeric_limits<int64_t>::max();
  const Shard& shard = problem.shard;
  const at::Tensor id = block.scores.argmax.to(at::kLong);
  if (problem.group.is_alone()) return at::where(id >= 0, id + shard.begin, id);
  // NaN must not take part in the maximum. If the scores of a row are NaN, they are NaN on all
  // ranks and the row gets -1 below. An empty shard's largest logit is NaN as well.
  const at::Tensor mine = block.max_logit.nan_to_num(-kInfinity, kInfinity, -kInfinity);
  at::Tensor max = mine.clone();
  problem.group.Max(max);
  at::Tensor first = at::where(mine == max, id + shard.begin, kNoColumn);
  if (shard.columns == 0) first.fill_(kNoColumn);
  problem.group.Min(first);
  return first.masked_fill_(block.scores.lse.isnan(), -1);
}

// Mean logit, without materialising logits unless a cap makes it necessary.

/// Splits fp32 values into three values of the 16-bit `dtype` that add up to them, [3, m]. The sums
/// have 24 bits, or slightly fewer if parts are too small for fp16. In fp32 there is one part.
at::Tensor Split(at::Tensor values, at::ScalarType dtype) {
  const int num_splits = dtype == at::kFloat ? 1 : 3;
  std::vector<at::Tensor> splits;
  for (int i = 0; i < num_splits; ++i) {
    splits.push_back(values.to(dtype));
    values = values - splits.back().to(at::kFloat);
  }
  return at::stack(splits);
}

/// Returns the largest absolute value. Values divided by it neither underflow nor overflow in fp16.
at::Tensor MaxAbs(const at::Tensor& values) {
  return values.abs().amax().clamp_min_(std::numeric_limits<float>::min());
}

/// Returns the sum of the weight's rows, fp32 [H]. Each row is multiplied by the mean-logit weight
/// of its vocabulary id.
at::Tensor MeanWeight(const Problem& problem) {
  const at::Tensor& weight = problem.inputs.weight;
  const int64_t columns = problem.shard.columns;
  const at::Tensor weights = MeanLogitWeights(problem, {0, columns}).to(at::kFloat);
  const at::Tensor max = MaxAbs(weights);
  const at::Tensor splits = Split(weights / max, weight.scalar_type());
  return at::mm(splits, weight.narrow(0, 0, columns), at::kFloat).sum(0).mul_(max);
}

/// Returns the mean logits of a head with a softcap, computed from blocks of logits.
at::Tensor MeanOfCappedLogits(const Rows& rows, const Problem& problem) {
  at::Tensor mean = at::zeros({rows.size()}, problem.inputs.hidden.options().dtype(at::kDouble));
  for (const Columns& columns : BlocksOfColumns(problem.shard, rows.size())) {
    const at::Tensor logits = BlockLogits(rows.hidden, problem, columns);
    mean += logits.to(at::kDouble).mv(MeanLogitWeights(problem, columns));
  }
  return mean.to(at::kFloat);
}

/// Returns the mean logits of a head without a softcap, computed as one product with the mean
/// weight.
at::Tensor MeanOfProducts(const Rows& rows, const Problem& problem) {
  const at::Tensor weight = MeanWeight(problem);
  const at::Tensor max = MaxAbs(weight);
  const at::Tensor splits = Split(weight / max, problem.inputs.hidden.scalar_type());
  at::Tensor mean =
      WideProduct(rows.hidden, splits.t(), at::kFloat).sum(1).mul_(max * problem.options.scale);
  if (problem.inputs.bias.has_value()) {
    const Columns all = {0, problem.shard.columns};
    const at::Tensor bias = problem.inputs.bias->narrow(0, 0, all.size()).to(at::kDouble);
    mean += bias.dot(MeanLogitWeights(problem, all)).to(at::kFloat);
  }
  return mean;
}

/// Returns the weighted mean of each row's logits over temperature, fp32 [n].
at::Tensor MeanLogit(const Rows& rows, const Problem& problem) {
  at::Tensor mean = at::zeros({rows.size()}, problem.inputs.hidden.options().dtype(at::kFloat));
  if (problem.shard.columns > 0) {
    mean = problem.options.softcap > 0 ? MeanOfCappedLogits(rows, problem)
                                       : MeanOfProducts(rows, problem);
  }
  mean.mul_(PerTemperature(1, rows, problem, at::kFloat).squeeze(1));
  problem.group.Sum(mean);
  return mean;
}

class FusedScores : public PendingScores {
 public:
  /// Enqueues the computation of the partials.
  FusedScores(const Rows& rows, const Problem& problem, const at::Tensor& cache)
      : rows_(rows),
        num_tiles_(kernels::NumTiles(problem.shard.columns)),
        has_cache_(cache.defined()),
        memory_(Allocate(rows.size(), num_tiles_, problem)) {
    const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    const FusedHead head(problem);
    const RowArrays arrays(rows, problem, head);
    ComputeOperands(rows.size(), arrays, memory_, stream);
    if (num_tiles_ > 0) {
      const FusedRows hidden(rows.hidden, problem);
      const int64_t weight_rows = problem.inputs.weight.size(0);
      ComputePartials(rows, {hidden, head}, memory_, cache, weight_rows, stream);
    }
  }

  LinearLogprobOutputs Join(const Problem& problem, bool are_targets_covered) override {
    const LinearLogprobOptions& options = problem.options;
    const c10::cuda::CUDAGuard on_device(problem.device());
    const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
    // The host waits for the number of rows only now, while the enqueued partials are computed.
    const Rows found = rows_.Resolved();
    if (rows_.pending != nullptr) {
      CheckTargets(rows_.pending->Result(), rows_.all_targets, problem);
    }
    BlockScores block;
    kernels::RowScoresParams params = ScoresParams(found.size(), memory_, problem, block);
    LinearLogprobOutputs& scores = block.scores;
    if (problem.group.is_alone() && num_tiles_ > 0) {
      params.num_tiles = num_tiles_;
      params.sums = memory_.partials;
      params.follows_partials = !has_cache_;
      CheckLaunch(LaunchRowScores(params, stream), "the score kernel");
      if (found.num_out_of_vocab > 0 || found.is_unchecked) {
        const double without_target =
            options.out_of_vocab_is_zero ? 0 : std::numeric_limits<double>::quiet_NaN();
        const at::Tensor columns = memory_.Values(memory_.target_columns, found.size(), at::kInt);
        scores.logprob = at::where(columns >= 0, scores.logprob, without_target);
      }
    } else {
      const at::Tensor num_owners = JoinShards(memory_, num_tiles_, params, problem.group, stream);
      if (!are_targets_covered) {
        CheckTargetOwners(found, num_owners, problem);
        if (options.out_of_vocab_is_zero) {
          scores.logprob = at::where(num_owners > 0, scores.logprob, 0);
        }
      }
    }
    if (options.need_argmax) scores.argmax = ArgmaxOverRanks(block, problem);
    if (options.need_mean_logit) scores.mean_logit = MeanLogit(found, problem);
    return scores;
  }

 private:
  const Rows rows_;
  const int64_t num_tiles_;
  const bool has_cache_;
  const Memory memory_;
};

}  // namespace

bool FusedPath::ScoresDuringCompaction(const Problem& problem) const {
  return problem.group.is_alone() && problem.num_rows() > 0 &&
         problem.num_rows() <= kCompactionRowsMax && !IsPartlyCached(problem);
}

void FusedPath::ReserveMemory(int64_t num_rows, const Problem& problem) const {
  const c10::cuda::CUDAGuard on_device(problem.device());
  const int64_t block_rows = std::min(num_rows, kScoreRowsMax);
  const Memory memory =
      Allocate(block_rows, kernels::NumTiles(problem.inputs.weight.size(0)), problem);
  FusedRows::EmptySplits(block_rows, problem);
}

std::unique_ptr<PendingScores> FusedPath::StartScores(const Rows& block, const Problem& problem,
                                                      const at::Tensor& cache) const {
  const c10::cuda::CUDAGuard on_device(problem.device());
  return std::make_unique<FusedScores>(block, problem, cache);
}

}  // namespace logprobd::torch_ops
