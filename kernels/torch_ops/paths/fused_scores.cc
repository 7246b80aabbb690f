// Computes scores with the fused kernels: first the partials of tiles, then the scores. In a group
// of ranks, the exact sums of kernels/combine/shard_sums.h are computed in between.

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/combine/list_scores.h"
#include "kernels/combine/row_scores.h"
#include "kernels/combine/shard_sums.h"
#include "kernels/common/arena.h"
#include "kernels/common/tile.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/listed_logits.h"
#include "kernels/fused/params.h"
#include "kernels/fused/top_k.h"
#include "kernels/fused/top_k_scratch.h"
#include "kernels/row_ops/row_constants.h"
#include "kernels/torch_ops/paths/fused_path.h"
#include "kernels/torch_ops/paths/kernel_arrays.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/rows/kernel_operands.h"

namespace logprobd::torch_ops {
namespace {

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
  int32_t* target_columns;  ///< -1 when another shard has the target.
  float* target_logits;     ///< 0 when another shard has the target.
  uint64_t* max_keys;       ///< LogitKeys of the shard's columns; null unless needed.
  uint32_t* min_keys;       ///< See FusedPartialsParams; null unless needed.
  uint64_t* top_keys;       ///< [n, top_k], LogitKeys of the shard's columns; null unless needed.
  TileSums* partials;       ///< [n, tiles], as `layout` says.
  float* tile_max;          ///< [n, tiles], for the top-k; null unless needed.
  /// Bytes from `partials` on that the search for the top-k may overwrite when the scores are
  /// computed; 0 without a top-k.
  int64_t scratch_bytes;
  TileSums* reference_sums;  ///< [n], sums of the first tile; null unless needed.
  int32_t* rank_counts;      ///< [n], null unless the target's rank is needed.
  RowNormalizer* normalizers;
  uint8_t* nonfinite;
  PartialLayout layout;
  bool wants_sum_squares;

  /// Returns the [n] values at `begin` as a tensor.
  template <typename T>
  at::Tensor Values(const T* begin, int64_t num_rows, at::ScalarType dtype) const {
    const auto* const values = reinterpret_cast<const uint8_t*>(begin);
    const int64_t offset = values - bytes.const_data_ptr<uint8_t>();
    return bytes.narrow(0, offset, num_rows * static_cast<int64_t>(sizeof(T))).view(dtype);
  }
};

bool NeedsMaxKeys(const LinearLogprobOptions& options) {
  return options.need_argmax || options.need_max_logit;
}

/// Places the arrays of a block of `num_rows` rows in `arena`.
Memory PlaceArrays(int64_t num_rows, int64_t num_tiles, const LinearLogprobOptions& options,
                   kernels::Arena& arena) {
  // Gradients that are linear in the exponentials do not need the largest logit in fp32.
  const bool needs_max =
      NeedsMaxKeys(options) || options.memory.keep_logits == LogitCacheKind::kExponentials;
  const bool needs_reference = options.memory.keep_logits == LogitCacheKind::kRebasedExponentials;
  const bool has_top_k = options.top_k > 0;
  Memory memory;
  memory.log2_scales = arena.Take<float>(num_rows);
  memory.target_columns = arena.Take<int32_t>(num_rows);
  memory.target_logits = arena.Take<float>(num_rows);
  memory.max_keys = arena.Take<uint64_t>(num_rows, needs_max);
  memory.min_keys = arena.Take<uint32_t>(num_rows, options.need_min_logit);
  memory.top_keys = arena.Take<uint64_t>(num_rows * options.top_k, has_top_k);
  const int64_t scratch_begin = arena.size();
  memory.partials = arena.Take<TileSums>(num_rows * num_tiles);
  memory.tile_max = arena.Take<float>(num_rows * num_tiles, has_top_k);
  if (has_top_k) {
    const auto scratch = kernels::TopKScratchOf(1, static_cast<int32_t>(options.top_k), num_tiles);
    arena.ExtendTo(scratch_begin + scratch.size_bytes);
  }
  memory.scratch_bytes = has_top_k ? arena.size() - scratch_begin : 0;
  memory.reference_sums = arena.Take<TileSums>(num_rows, needs_reference);
  memory.rank_counts = arena.Take<int32_t>(num_rows, options.need_target_rank);
  memory.normalizers = arena.Take<RowNormalizer>(num_rows);
  memory.nonfinite = arena.Take<uint8_t>(num_rows);
  memory.layout = kernels::PartialLayoutOf(num_rows, num_tiles);
  memory.wants_sum_squares = options.need_sum_p_squared;
  return memory;
}

Memory Allocate(int64_t num_rows, int64_t num_tiles, const Problem& problem) {
  kernels::Arena sizes;
  PlaceArrays(num_rows, num_tiles, problem.options, sizes);
  const at::Tensor bytes =
      at::empty({sizes.size()}, problem.inputs.hidden.options().dtype(at::kByte));
  kernels::Arena arena(PointerTo<std::byte>(bytes));
  Memory memory = PlaceArrays(num_rows, num_tiles, problem.options, arena);
  memory.bytes = bytes;
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
  if (memory.min_keys != nullptr) memory.Values(memory.min_keys, num_rows, at::kInt).zero_();
}

/// The operands of a block of rows.
struct Operands {
  Operands(const at::Tensor& rows, const Problem& problem) : hidden(rows, problem), head(problem) {}

  FusedRows hidden;
  FusedHead head;
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
  if (memory.min_keys != nullptr) params.min_keys = memory.min_keys + part.begin;
  if (memory.tile_max != nullptr) {
    params.tile_max = memory.tile_max + part.begin * operands.head.num_tiles();
  }
  params.wants_sum_squares = memory.wants_sum_squares;
  if (memory.rank_counts != nullptr) params.rank_counts = memory.rank_counts + part.begin;
  return params;
}

/// Computes the logits of the targets, with which the fused kernel compares all others.
void ComputeTargetLogits(int64_t num_rows, const Operands& operands, const Memory& memory,
                         cudaStream_t stream) {
  memory.Values(memory.rank_counts, num_rows, at::kInt).zero_();
  kernels::ListedLogitsParams params;
  params.partials = operands.head.Params(operands.hidden, 0, operands.head.num_tiles());
  params.ids = memory.target_columns;
  params.count = num_rows;
  params.logits = memory.target_logits;
  CheckLaunch(LaunchListedLogits(params, stream), "the kernel of target logits");
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
                           const at::Tensor& cache, const Problem& problem, cudaStream_t stream) {
  kernels::FusedPartialsParams params = AllPartialsParams(part, operands, memory);
  if (memory.reference_sums != nullptr) ComputeReferenceSums(part, operands, memory, stream);
  const CachedRowLayout<int64_t> layout(problem.inputs.weight.size(0));
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
                     const at::Tensor& cache, const Problem& problem, cudaStream_t stream) {
  const int64_t* const row_count = rows.pending == nullptr ? nullptr : rows.pending->count();
  const int64_t num_cached = cache.defined() ? cache.size(0) : 0;
  if (num_cached > 0) {
    ComputeCachedPartials({0, num_cached, row_count}, operands, memory, cache, problem, stream);
  }
  const PartOfRows others = {num_cached, rows.size() - num_cached, row_count};
  if (others.size == 0) return;
  CheckLaunch(LaunchFusedPartials(AllPartialsParams(others, operands, memory), stream),
              "the fused kernel");
}

// Scores.

/// Allocates the scores of the first `num_rows` rows. The caller sets the partials. The argmax is
/// int32.
kernels::RowScoresParams ScoresParams(int64_t num_rows, const Memory& memory, const FusedHead& head,
                                      const Problem& problem, LinearLogprobOutputs& scores) {
  const LinearLogprobOptions& options = problem.options;
  const auto fp32 = memory.bytes.options().dtype(at::kFloat);
  const auto floats = [&] { return at::empty({num_rows}, fp32); };
  kernels::RowScoresParams params;
  params.num_rows = num_rows;
  params.vocab_size = problem.shard.vocab_size;
  params.layout = memory.layout;
  params.log2_scales = memory.log2_scales;
  params.logit_correction = static_cast<float>(head.correction());
  params.target_logits = memory.target_logits;
  params.normalizers = memory.normalizers;
  params.nonfinite = memory.nonfinite;
  params.logprob = PointerTo<float>(scores.logprob = floats());
  params.lse = PointerTo<float>(scores.lse = floats());
  params.lse_rest = PointerTo<float>(scores.lse_rest = floats());
  if (options.need_entropy) params.entropy = PointerTo<float>(scores.entropy = floats());
  if (NeedsMaxKeys(options)) params.max_keys = memory.max_keys;
  if (options.need_argmax) {
    scores.argmax = at::empty({num_rows}, fp32.dtype(at::kInt));
    params.argmax_id = PointerTo<int32_t>(scores.argmax);
  }
  if (options.need_max_logit) params.max_logit = PointerTo<float>(scores.max_logit = floats());
  if (options.need_min_logit) {
    params.min_keys = memory.min_keys;
    params.min_logit = PointerTo<float>(scores.min_logit = floats());
  }
  if (options.need_sum_p_squared) {
    params.sum_p_squared = PointerTo<float>(scores.sum_p_squared = floats());
  }
  if (options.need_target_rank) {
    scores.target_rank = at::empty({num_rows}, fp32.dtype(at::kInt));
    params.rank_counts = memory.rank_counts;
    params.target_rank = PointerTo<int32_t>(scores.target_rank);
  }
  return params;
}

/// Inverts the sign bit of integers. Torch compares signed integers: the order of the results is
/// that of the unsigned arguments, and the other way round.
at::Tensor InvertSign(const at::Tensor& keys) {
  return keys.bitwise_xor(keys.scalar_type() == at::kInt
                              ? at::Scalar(std::numeric_limits<int32_t>::min())
                              : at::Scalar(std::numeric_limits<int64_t>::min()));
}

/// Turns LogitKeys of the shard's columns into those of ids. 0, which is no key, remains.
at::Tensor KeysOfIds(const at::Tensor& keys, const Shard& shard) {
  // A key contains the complement of its column, so a larger column gives a smaller key.
  return keys - keys.ne(0).mul(shard.begin);
}

/// Replaces `keys` by their maximum over all ranks, compared as unsigned integers.
void MaxOverRanks(const at::Tensor& keys, const RankGroup& group) {
  at::Tensor max = InvertSign(keys);
  group.Max(max);
  keys.copy_(InvertSign(max));
}

/// Replaces the keys of the largest and smallest logits of this shard by those of all shards. Keys
/// of columns become keys of ids.
void JoinKeys(const Memory& memory, int64_t num_rows, const Problem& problem) {
  if (NeedsMaxKeys(problem.options)) {
    at::Tensor keys = memory.Values(memory.max_keys, num_rows, at::kLong);
    keys.copy_(KeysOfIds(keys, problem.shard));
    MaxOverRanks(keys, problem.group);
  }
  if (memory.min_keys != nullptr) {
    MaxOverRanks(memory.Values(memory.min_keys, num_rows, at::kInt), problem.group);
  }
}

/// Combines the sums of all shards and computes the scores, with the same bits on every rank.
/// Returns the number of ranks that have each row's target.
at::Tensor JoinShards(const Memory& memory, int64_t num_tiles,
                      const kernels::RowScoresParams& scores, const Problem& problem,
                      cudaStream_t stream) {
  const RankGroup& group = problem.group;
  const bool has_squares = problem.options.need_sum_p_squared;
  const auto integers = memory.bytes.options().dtype(at::kLong);
  const int64_t num_rows = scores.num_rows;
  at::Tensor exponents = at::empty({num_rows}, integers.dtype(at::kInt));
  const int64_t num_fields = kernels::NumSumFields(has_squares, /*has_entropy_sums=*/false);
  at::Tensor sums = at::empty({num_fields + 2, num_rows}, integers);
  kernels::ShardSumsParams params;
  params.num_rows = num_rows;
  params.num_tiles = num_tiles;
  params.layout = memory.layout;
  params.sums = memory.partials;
  params.wants_sum_squares = has_squares;
  params.exponents = PointerTo<int32_t>(exponents);
  params.target_columns = memory.target_columns;
  params.target_logits = memory.target_logits;
  params.row_sums = PointerTo<int64_t>(sums);
  CheckLaunch(LaunchShardExponents(params, stream), "the shard exponent kernel");
  group.Max(exponents);
  CheckLaunch(LaunchShardSums(params, stream), "the shard sum kernel");
  group.Sum(sums);
  JoinKeys(memory, num_rows, problem);
  kernels::ShardScoresParams joined;
  joined.scores = scores;
  joined.has_sum_squares = has_squares;
  joined.exponents = params.exponents;
  joined.row_sums = params.row_sums;
  joined.target_logits = memory.target_logits;
  CheckLaunch(LaunchShardScores(joined, stream), "the score kernel");
  return sums[num_fields + 1];
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

/// Returns this shard's part of the weighted mean of each row's logits over temperature, fp32 [n].
at::Tensor MeanLogit(const Rows& rows, const Problem& problem) {
  at::Tensor mean = at::zeros({rows.size()}, problem.inputs.hidden.options().dtype(at::kFloat));
  if (problem.shard.columns > 0) {
    mean = problem.options.softcap > 0 ? MeanOfCappedLogits(rows, problem)
                                       : MeanOfProducts(rows, problem);
  }
  return mean.mul_(PerTemperature(1, rows, problem, at::kFloat).squeeze(1));
}

// Top-k and candidates.

/// Returns an upper bound of the bytes per entry of a top-k that ComputeTopK allocates: int64 keys,
/// ids and logprobs of this rank, and the keys of all ranks twice.
int64_t TopKBytesMax(const RankGroup& group) { return 64 + 16 * group.size(); }

/// Searches for the largest logits of `rows`, which overwrites the partials, and sets the lists of
/// all ranks together. `scores` has the rows' normalizers.
void ComputeTopK(const Rows& rows, const Operands& operands, const Memory& memory,
                 const Problem& problem, const kernels::RowScoresParams& normalized,
                 cudaStream_t stream, LinearLogprobOutputs& scores) {
  const int64_t top_k = problem.options.top_k;
  const int64_t num_rows = rows.size();
  at::Tensor keys = memory.Values(memory.top_keys, num_rows * top_k, at::kLong);
  const int64_t num_tiles = operands.head.num_tiles();
  if (num_tiles == 0) {
    keys.zero_();
  } else {
    kernels::FusedTopKParams search;
    search.partials = PartialsParams({0, num_rows, nullptr}, operands, num_tiles, memory);
    search.partials.tile_max = memory.tile_max;
    search.top_k = static_cast<int32_t>(top_k);
    search.keys = memory.top_keys;
    search.workspace = reinterpret_cast<std::byte*>(memory.partials);
    search.workspace_bytes = memory.scratch_bytes;
    CheckLaunch(LaunchFusedTopK(search, stream), "the search for the top-k");
  }
  keys = KeysOfIds(keys, problem.shard);
  const RankGroup& group = problem.group;
  if (group.size() > 1) {
    const at::Tensor gathered = group.Gather(InvertSign(keys).view({num_rows, top_k}));
    const at::Tensor lists = gathered.view({group.size(), num_rows, top_k}).permute({1, 0, 2});
    const at::Tensor all = lists.reshape({num_rows, group.size() * top_k});
    keys = InvertSign(std::get<0>(all.topk(top_k, 1))).contiguous();
  }
  scores.top_k_ids = at::empty({num_rows, top_k}, keys.options().dtype(at::kInt));
  scores.top_k_logprobs = at::empty({num_rows, top_k}, keys.options().dtype(at::kFloat));
  kernels::TopKScoresParams params;
  params.num_rows = num_rows;
  params.top_k = static_cast<int32_t>(top_k);
  params.keys = reinterpret_cast<const uint64_t*>(keys.const_data_ptr<int64_t>());
  params.normalizers = normalized.normalizers;
  params.log2_scales = normalized.log2_scales;
  params.ids = PointerTo<int32_t>(scores.top_k_ids);
  params.logprobs = PointerTo<float>(scores.top_k_logprobs);
  CheckLaunch(LaunchTopKScores(params, stream), "the kernel of top-k scores");
}

/// The candidates of all rows and their logits in this shard, [N] each.
struct CandidateLogits {
  at::Tensor rows;       ///< int32: row of the block; -1 for other rows.
  at::Tensor is_inside;  ///< bool: whether row and column are those of the block.
  at::Tensor logits;     ///< fp32, 0 unless is_inside.
};

CandidateLogits ComputeCandidateLogits(const Rows& rows, const Operands& operands,
                                       const Problem& problem, cudaStream_t stream) {
  const ListedPairs pairs = rows.candidates.RelativeTo(0, problem.shard.begin);
  const auto in_32_bits = [](const at::Tensor& values) {
    return values.clamp(-1, std::numeric_limits<int32_t>::max()).to(at::kInt);
  };
  CandidateLogits candidates;
  candidates.rows = in_32_bits(pairs.rows.masked_fill(pairs.rows >= rows.size(), -1));
  candidates.logits = at::zeros_like(pairs.ids, at::kFloat);
  if (problem.shard.columns == 0) {
    candidates.is_inside = at::zeros_like(pairs.ids, at::kBool);
    return candidates;
  }
  candidates.is_inside = FindPairs(pairs, rows.size(), problem.shard.columns).is_inside;
  const at::Tensor columns = in_32_bits(pairs.ids);
  kernels::ListedLogitsParams params;
  params.partials = operands.head.Params(operands.hidden, 0, operands.head.num_tiles());
  params.rows = candidates.rows.const_data_ptr<int32_t>();
  params.ids = columns.const_data_ptr<int32_t>();
  params.count = pairs.ids.size(0);
  params.logits = PointerTo<float>(candidates.logits);
  CheckLaunch(LaunchListedLogits(params, stream), "the kernel of listed logits");
  return candidates;
}

/// Returns the log-probabilities of the block's candidates, with zeros for other rows. A candidate
/// that no shard has gets NaN.
at::Tensor CandidateLogprobs(const CandidateLogits& mine, const kernels::RowScoresParams& scores,
                             const RankGroup& group, cudaStream_t stream) {
  at::Tensor shared = at::stack({mine.logits.view(at::kInt), mine.is_inside.to(at::kInt)});
  group.Sum(shared);
  at::Tensor logprobs = shared[0].view(at::kFloat).contiguous();
  kernels::CandidateScoresParams params;
  params.rows = mine.rows.const_data_ptr<int32_t>();
  params.row_end = static_cast<int32_t>(scores.num_rows);
  params.count = logprobs.size(0);
  params.normalizers = scores.normalizers;
  params.log2_scales = scores.log2_scales;
  params.scores = PointerTo<float>(logprobs);
  CheckLaunch(LaunchCandidateScores(params, stream), "the kernel of candidates");
  return at::where(mine.rows >= 0, at::where(shared[1] > 0, logprobs, std::nanf("")), 0);
}

class FusedScores : public PendingScores {
 public:
  /// Enqueues the computation of the partials.
  FusedScores(const Rows& rows, const Problem& problem, const at::Tensor& cache)
      : num_tiles_(kernels::NumTiles(problem.shard.columns)),
        operands_(rows.hidden, problem),
        memory_(Allocate(rows.size(), num_tiles_, problem)) {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const RowArrays arrays(rows, problem, operands_.head);
    ComputeOperands(rows.size(), arrays, memory_, stream);
    if (num_tiles_ > 0 && memory_.rank_counts != nullptr) {
      ComputeTargetLogits(rows.size(), operands_, memory_, stream);
    }
    if (num_tiles_ > 0) ComputePartials(rows, operands_, memory_, cache, problem, stream);
  }

  LinearLogprobOutputs Join(const Rows& block, const Problem& problem) override {
    const LinearLogprobOptions& options = problem.options;
    const c10::cuda::CUDAGuard on_device(problem.device());
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    // The host waits for the number of rows only now, while the enqueued partials are computed.
    const Rows found = block.Resolved();
    if (block.pending != nullptr) CheckTargets(block.pending->Result(), block.all_targets, problem);
    LinearLogprobOutputs scores;
    kernels::RowScoresParams params =
        ScoresParams(found.size(), memory_, operands_.head, problem, scores);
    const double without_target =
        options.out_of_vocab_is_zero ? 0 : std::numeric_limits<double>::quiet_NaN();
    if (problem.group.is_alone() && num_tiles_ > 0) {
      params.num_tiles = num_tiles_;
      params.sums = memory_.partials;
      CheckLaunch(LaunchRowScores(params, stream), "the score kernel");
      if (found.num_out_of_vocab > 0 || found.is_unchecked) {
        const at::Tensor columns = memory_.Values(memory_.target_columns, found.size(), at::kInt);
        scores.logprob = at::where(columns >= 0, scores.logprob, without_target);
        if (options.need_target_rank) {
          scores.target_rank = at::where(columns >= 0, scores.target_rank, -1);
        }
      }
      if (options.need_argmax && problem.shard.begin > 0) {
        scores.argmax = at::where(scores.argmax >= 0, scores.argmax + problem.shard.begin, -1);
      }
    } else {
      const at::Tensor num_owners = JoinShards(memory_, num_tiles_, params, problem, stream);
      if (!found.are_targets_covered) {
        CheckTargetOwners(found, num_owners, problem);
        if (options.out_of_vocab_is_zero || found.is_unchecked) {
          scores.logprob = at::where(num_owners > 0, scores.logprob, without_target);
        }
      }
    }
    if (options.top_k > 0) ComputeTopK(found, operands_, memory_, problem, params, stream, scores);
    if (found.candidates.defined()) {
      const CandidateLogits candidates = ComputeCandidateLogits(found, operands_, problem, stream);
      scores.candidate_logprobs = CandidateLogprobs(candidates, params, problem.group, stream);
    }
    if (options.need_mean_logit) {
      // Its products take memory of any size, so here the ranks wait for each other once more.
      problem.group.RunOnAllRanks(problem.device(),
                                  [&] { scores.mean_logit = MeanLogit(found, problem); });
      problem.group.Sum(scores.mean_logit);
    }
    return scores;
  }

 private:
  const int64_t num_tiles_;
  const Operands operands_;
  const Memory memory_;
};

}  // namespace

bool FusedPath::ScoresDuringCompaction(const Problem& problem) const {
  return problem.group.is_alone() && problem.num_rows() > 0 &&
         problem.num_rows() <= kCompactionRowsMax && !IsPartlyCached(problem) &&
         !problem.options.need_target_rank;  // LaunchListedLogits needs the number of rows.
}

void FusedPath::ReserveMemory(int64_t num_rows, const Problem& problem) const {
  const c10::cuda::CUDAGuard on_device(problem.device());
  const int64_t block_rows = std::min(num_rows, kScoreRowsMax);
  const int64_t weight_rows = problem.inputs.weight.size(0);
  const Memory memory = Allocate(block_rows, kernels::NumTiles(weight_rows), problem);
  const at::Tensor splits = FusedRows::EmptySplits(block_rows, problem);
  const at::Tensor lists = at::empty(
      {block_rows * problem.options.top_k, TopKBytesMax(problem.group)}, memory.bytes.options());
  if (problem.inputs.bias.has_value()) PaddedToTiles(*problem.inputs.bias, weight_rows);
}

void FusedPath::AlignInputs(LinearLogprobInputs& inputs) const {
  inputs.hidden = Aligned(inputs.hidden);
  inputs.weight = Aligned(inputs.weight);
}

std::unique_ptr<PendingScores> FusedPath::StartScores(const Rows& block, const Problem& problem,
                                                      const at::Tensor& cache) const {
  const c10::cuda::CUDAGuard on_device(problem.device());
  return std::make_unique<FusedScores>(block, problem, cache);
}

}  // namespace logprobd::torch_ops
