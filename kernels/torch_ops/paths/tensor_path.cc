// Computes scores and gradients with tensor operations, for every device, dtype and option.
//
// Scores: logits of a block of rows and columns -> sums of tiles -> sums of rows over all shards ->
// scores. The sums of rows are integers, so that every grouping gives bit-identical sums.
// Gradients: logits, cached or recomputed -> gradient of the logits -> gradient of the dot
// products.

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/paths/scoring_path.h"

namespace logprobd::torch_ops {
namespace {

using kernels::kFixedPointOne;
using kernels::kTileColumns;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kNoColumn = std::numeric_limits<int64_t>::max();
/// Largest number of (row, tile) sums that exist at a time.
constexpr int64_t kBlockTileSums = int64_t{2} << 20;
/// If a tile's exponent is this far below the row's exponent, the tile's sums are less than half a
/// quantum.
constexpr double kShiftMin = -100;

// Sums of tiles.

/// Sums of each row over each tile of a shard (kernels/common/tile.h), fp64 [n, tiles].
struct TileStats {
  at::Tensor exponent;  ///< k: -inf if all logits are -inf; NaN or +inf if one logit is.
  at::Tensor sum;       ///< Sum of 2^(y - k).
  at::Tensor weighted;  ///< Sum of (y - k) 2^(y - k); undefined unless entropy is needed.
  at::Tensor squares;   ///< Sum of 2^(2 (y - k)); undefined unless the sum of p^2 is needed.
};

/// Returns the sums of `num_tiles` tiles that contain no logits.
TileStats EmptyTiles(const at::Tensor& like_rows, int64_t num_tiles,
                     const LinearLogprobOptions& options) {
  const auto zeros = [&] {
    return like_rows.new_zeros({like_rows.size(0), num_tiles}, at::kDouble);
  };
  TileStats tiles;
  tiles.exponent = zeros().fill_(-kInfinity);
  tiles.sum = zeros();
  if (options.need_entropy) tiles.weighted = zeros();
  if (options.need_sum_p_squared) tiles.squares = zeros();
  return tiles;
}

/// Writes the sums of a block of logits, [n, columns], to `tiles` from index `tile` on.
/// `log2_scales`, fp64 [n, 1], is log2(e) / temperature. `first` is the vocabulary id of the first
/// column; the block may begin and end inside tiles of the whole vocabulary.
void SumTiles(const at::Tensor& logits, const at::Tensor& log2_scales, int64_t first, int64_t tile,
              TileStats& tiles) {
  const int64_t before = first % kTileColumns;
  const int64_t after = (kTileColumns - (before + logits.size(1)) % kTileColumns) % kTileColumns;
  // y is fp64, because rounding it to fp32 would lose more accuracy than all later steps.
  at::Tensor y = logits.to(at::kDouble) * log2_scales;
  if (before > 0 || after > 0) y = at::constant_pad_nd(y, {before, after}, -kInfinity);
  y = y.view({y.size(0), -1, kTileColumns});
  const at::Tensor exponent = y.amax(2, /*keepdim=*/true).ceil_();
  const at::Tensor u = y.sub_(exponent);
  const at::Tensor exponentials = u.exp2();
  const int64_t count = y.size(1);
  tiles.exponent.narrow(1, tile, count).copy_(exponent.squeeze(2));
  tiles.sum.narrow(1, tile, count).copy_(exponentials.sum(2));
  if (tiles.weighted.defined()) {
    // -inf * 0 would be NaN.
    const at::Tensor weighted = at::where(exponentials == 0, 0, u).mul_(exponentials).sum(2);
    tiles.weighted.narrow(1, tile, count).copy_(weighted);
  }
  if (tiles.squares.defined()) {
    tiles.squares.narrow(1, tile, count).copy_(exponentials.square().sum(2));
  }
}

/// Sums of rows over all tiles, int64 [n], in fixed point relative to the rows' exponents.
struct FixedSums {
  at::Tensor sum;
  at::Tensor weighted;  ///< Undefined if TileStats::weighted is undefined.
  at::Tensor squares;   ///< Undefined if TileStats::squares is undefined.
};

at::Tensor SumInFixedPoint(const at::Tensor& values) {
  return values.mul(kFixedPointOne).round_().to(at::kLong).sum(1);
}

/// Sums the tiles of each row. `exponents` [n] holds the largest exponent of each row over all
/// shards, so that sums over shards are exact (kernels/common/row_sums.h).
FixedSums SumRows(const TileStats& tiles, const at::Tensor& exponents) {
  at::Tensor shift = tiles.exponent - exponents.unsqueeze(1);
  const at::Tensor is_negligible = shift.gt(kShiftMin).logical_not_();  // true for NaN as well
  shift.masked_fill_(is_negligible, 0);
  const at::Tensor factor = shift.exp2().masked_fill_(is_negligible, 0);
  FixedSums fixed;
  fixed.sum = SumInFixedPoint(tiles.sum.nan_to_num(0) * factor);
  if (tiles.weighted.defined()) {
    const at::Tensor shifted = tiles.weighted + shift * tiles.sum;
    fixed.weighted = SumInFixedPoint(shifted.nan_to_num(0) * factor);
  }
  if (tiles.squares.defined()) {
    fixed.squares = SumInFixedPoint(tiles.squares.nan_to_num(0) * factor * factor);
  }
  return fixed;
}

// Scores.

/// Statistics of a block of rows over the columns of this shard; [n] each, fp64 unless noted.
struct BlockStats {
  TileStats tiles;
  at::Tensor target_logit;  ///< 0 when another shard has the target.
  at::Tensor has_target;    ///< bool: whether this shard has the target.
  at::Tensor max_logit;     ///< -inf for an empty shard; undefined unless needed.
  at::Tensor argmax;        ///< int64: the lowest id with max_logit.
  at::Tensor min_logit;     ///< +inf for an empty shard; undefined unless needed.
  at::Tensor mean_logit;    ///< Mean of x; undefined unless needed.
  at::Tensor top_logits;    ///< [n, <= top_k], best first.
  at::Tensor top_ids;       ///< int64 [n, <= top_k]
  // Of the candidates, [N]; undefined if there are none.
  at::Tensor candidate_logit;  ///< 0 when another shard or block of rows has the candidate.
  at::Tensor has_candidate;    ///< bool
};

bool NeedsMax(const LinearLogprobOptions& options) {
  return options.need_argmax || options.need_max_logit;
}

void AccumulateTargets(const at::Tensor& logits, const Rows& rows, int64_t first,
                       BlockStats& stats) {
  const auto [column, is_in_range] = FindTargets(rows, first, logits.size(1));
  const at::Tensor logit = logits.gather(1, column.unsqueeze(1)).squeeze(1);
  stats.target_logit = at::where(is_in_range, logit.to(at::kDouble), stats.target_logit);
  stats.has_target.logical_or_(is_in_range);
}

void AccumulateCandidates(const at::Tensor& logits, const Rows& rows, int64_t first,
                          BlockStats& stats) {
  const auto [row, column, is_inside] =
      FindPairs(rows.candidates.RelativeTo(0, first), logits.size(0), logits.size(1));
  const at::Tensor logit = logits.index({row, column}).to(at::kDouble);
  stats.candidate_logit = at::where(is_inside, logit, stats.candidate_logit);
  stats.has_candidate.logical_or_(is_inside);
}

/// The largest logits of each row, best first, and their ids, [n, <= count] each.
struct TopLogits {
  at::Tensor logits;
  at::Tensor ids;
};

/// Returns the first `count` entries of each row, by descending logits. Entries with equal logits
/// keep their order.
TopLogits SortTop(const TopLogits& unsorted, int64_t count) {
  const auto [logits, order] =
      at::sort(unsorted.logits, /*stable=*/true, /*dim=*/1, /*descending=*/true);
  count = std::min(count, logits.size(1));
  return {logits.narrow(1, 0, count), unsorted.ids.gather(1, order.narrow(1, 0, count))};
}

/// Returns the columns of the `count` largest values of each row, ascending; [n, count]. Among
/// equal values, the lowest columns are chosen.
at::Tensor LargestColumns(const at::Tensor& values, int64_t count) {
  const int64_t num_columns = values.size(1);
  // topk chooses arbitrary columns among equal values, so only its smallest value is used.
  const at::Tensor least = std::get<0>(values.topk(count, 1)).narrow(1, count - 1, 1);
  const at::Tensor is_larger = values > least;
  const at::Tensor is_equal = values == least;
  const at::Tensor num_equal = is_larger.sum(1, /*keepdim=*/true).neg_().add_(count);
  const at::Tensor is_chosen =
      is_equal.cumsum(1).le(num_equal).logical_and_(is_equal).logical_or_(is_larger);
  const at::Tensor from_end =
      at::arange(num_columns, 0, -1, values.options().dtype(at::kInt)).mul(is_chosen);
  const at::Tensor columns = num_columns - std::get<0>(from_end.topk(count, 1)).to(at::kLong);
  return columns.clamp_max_(num_columns - 1);  // Fewer are chosen if a value is NaN.
}

void AccumulateTopK(const at::Tensor& logits, int64_t first, int64_t top_k, BlockStats& stats) {
  const at::Tensor columns = LargestColumns(logits, std::min(top_k, logits.size(1)));
  const at::Tensor best = logits.gather(1, columns).to(at::kDouble);
  const TopLogits top = SortTop(
      {at::cat({stats.top_logits, best}, 1), at::cat({stats.top_ids, columns + first}, 1)}, top_k);
  stats.top_logits = top.logits;
  stats.top_ids = top.ids;
}

/// Merges the lists of all ranks. The results have `top_k` entries; those behind the last id have
/// kNoColumn.
TopLogits MergeTop(const TopLogits& mine, int64_t top_k, const RankGroup& group) {
  const int64_t num_missing = top_k - mine.ids.size(1);
  TopLogits merged = {at::constant_pad_nd(mine.logits, {0, num_missing}, -kInfinity),
                      at::constant_pad_nd(mine.ids, {0, num_missing}, kNoColumn)};
  if (group.size() == 1) return merged;
  const auto gather = [&](const at::Tensor& lists) {
    const at::Tensor all = group.Gather(lists).view({group.size(), -1, top_k});
    return all.permute({1, 0, 2}).reshape({-1, group.size() * top_k});
  };
  const auto [ids, order] = gather(merged.ids).sort(1);
  return SortTop({gather(merged.logits).gather(1, order), ids}, top_k);
}

void AccumulateArgmax(const at::Tensor& logits, int64_t first, BlockStats& stats) {
  const auto [max, column] = logits.max(1);
  const at::Tensor wide = max.to(at::kDouble);
  // The comparison is strict, so that the lowest id wins a tie. A NaN replaces every number and is
  // not replaced by one.
  const at::Tensor is_larger = wide.gt(stats.max_logit).logical_or_(wide.isnan());
  stats.max_logit = at::where(is_larger, wide, stats.max_logit);
  stats.argmax = at::where(is_larger, column + first, stats.argmax);
}

/// Computes the statistics of `rows`, and writes the logits of the first rows to `cache` if it is
/// defined.
BlockStats AccumulateStats(const Rows& rows, const Problem& problem, const at::Tensor& cache) {
  const LinearLogprobOptions& options = problem.options;
  const Shard& shard = problem.shard;
  const at::Tensor log2_scales = PerTemperature(kLog2E, rows, problem, at::kDouble);
  const auto zero = rows.all_targets.new_zeros({rows.size()}, at::kDouble);
  const int64_t first_tile = shard.begin / kTileColumns;
  const int64_t num_tiles =
      shard.columns == 0 ? 0 : kernels::NumTiles(shard.begin + shard.columns) - first_tile;
  BlockStats stats;
  stats.tiles = EmptyTiles(zero, num_tiles, options);
  stats.target_logit = zero;
  stats.has_target = rows.all_targets.new_zeros({rows.size()}, at::kBool);
  if (NeedsMax(options)) {
    stats.max_logit = at::full_like(zero, -kInfinity);
    stats.argmax = rows.all_targets.new_full({rows.size()}, kNoColumn);
  }
  if (options.need_min_logit) stats.min_logit = at::full_like(zero, kInfinity);
  if (options.need_mean_logit) stats.mean_logit = zero.clone();
  if (options.top_k > 0) {
    stats.top_logits = zero.new_zeros({rows.size(), 0});
    stats.top_ids = rows.all_targets.new_zeros({rows.size(), 0});
  }
  if (rows.candidates.defined()) {
    stats.candidate_logit = at::zeros_like(rows.candidates.ids, at::kDouble);
    stats.has_candidate = at::zeros_like(rows.candidates.ids, at::kBool);
  }
  for (const Columns& columns : BlocksOfColumns(shard, rows.size())) {
    const int64_t first = shard.begin + columns.begin;
    const at::Tensor logits = BlockLogits(rows.hidden, problem, columns);
    if (cache.defined()) CacheLogits(cache, columns, logits);
    SumTiles(logits, log2_scales, first, first / kTileColumns - first_tile, stats.tiles);
    AccumulateTargets(logits, rows, first, stats);
    if (rows.candidates.defined()) AccumulateCandidates(logits, rows, first, stats);
    if (NeedsMax(options)) AccumulateArgmax(logits, first, stats);
    if (options.top_k > 0) AccumulateTopK(logits, first, options.top_k, stats);
    if (options.need_min_logit) {
      stats.min_logit = stats.min_logit.minimum(logits.amin(1).to(at::kDouble));
    }
    if (options.need_mean_logit) {
      stats.mean_logit += logits.to(at::kDouble).mv(MeanLogitWeights(problem, columns));
    }
  }
  if (options.need_mean_logit) {
    stats.mean_logit.mul_(log2_scales.squeeze(1)).mul_(kernels::kLn2);
  }
  return stats;
}

/// Returns the number of this shard's logits that rank above the target's, int64 [n]. The target's
/// logit, fp64 [n], may be another shard's.
at::Tensor CountAbove(const at::Tensor& target_logit, const Rows& rows, const Problem& problem) {
  const at::Tensor target = rows.target().unsqueeze(1);
  const at::Tensor limit = target_logit.to(problem.wide).unsqueeze(1);
  at::Tensor count = at::zeros_like(rows.target());
  for (const Columns& columns : BlocksOfColumns(problem.shard, rows.size())) {
    const at::Tensor logits = BlockLogits(rows.hidden, problem, columns);
    const int64_t first = problem.shard.begin + columns.begin;
    const at::Tensor is_before =
        at::arange(first, first + columns.size(), count.options()).unsqueeze(0) < target;
    const at::Tensor is_above =
        logits.eq(limit).logical_and_(is_before).logical_or_(logits > limit);
    count += is_above.sum(1);
  }
  return count;
}

/// Returns the largest exponent of each row over the tiles of this shard.
at::Tensor MaxExponents(const TileStats& tiles) {
  const at::Tensor empty_tile = at::full({tiles.exponent.size(0), 1}, -kInfinity,
                                         tiles.exponent.options());  // An empty shard has no tiles.
  // NaN becomes +inf, which the maximum of every collective backend preserves.
  return at::cat({tiles.exponent, empty_tile}, 1)
      .amax(1)
      .nan_to_num_(kInfinity, kInfinity, -kInfinity);
}

class TensorScores : public PendingScores {
 public:
  /// Ranks of a group make it together.
  TensorScores(const Rows& rows, const Problem& problem, const at::Tensor& cache) : rows_(rows) {
    problem.group.RunOnAllRanks(problem.device(), [&] {
      stats_ = AccumulateStats(rows, problem, cache);
      max_exponents_ = MaxExponents(stats_.tiles);
    });
  }

  LinearLogprobOutputs Join(const Problem& problem, bool are_targets_covered) override {
    const LinearLogprobOptions& options = problem.options;
    const RankGroup& group = problem.group;
    const TileStats& tiles = stats_.tiles;
    at::Tensor& exponents = max_exponents_;
    group.Max(exponents);
    at::Tensor sums;
    group.RunOnAllRanks(problem.device(), [&] {
      const FixedSums fixed = SumRows(tiles, exponents);
      std::vector<at::Tensor> parts = {fixed.sum, stats_.target_logit.view(at::kLong),
                                       stats_.has_target.to(at::kLong)};
      if (options.need_entropy) parts.push_back(fixed.weighted);
      if (options.need_sum_p_squared) parts.push_back(fixed.squares);
      sums = at::stack(parts);
    });
    // Sums of integers are exact. This also holds for the bits of the target's logit, which are 0
    // on all ranks but one.
    group.Sum(sums);

    const at::Tensor is_finite = exponents.isfinite();
    const at::Tensor sum = sums[0].to(at::kDouble);
    const at::Tensor log2_sum = sum.div(kFixedPointOne).log2_();
    const auto where_finite = [&](const at::Tensor& values) {
      return at::where(is_finite, values, kNan);
    };
    const at::Tensor log2_scales = PerTemperature(kLog2E, rows_, problem, at::kDouble).squeeze(1);
    const auto logprob_of = [&](const at::Tensor& y, const at::Tensor& exponent,
                                const at::Tensor& log2_total) {
      return ((y - exponent) - log2_total).mul_(kernels::kLn2).clamp_max_(0);
    };
    const at::Tensor y = sums[1].contiguous().view(at::kDouble) * log2_scales;
    LinearLogprobOutputs scores;
    scores.lse = where_finite((exponents + log2_sum) * kernels::kLn2);
    scores.lse_rest = scores.lse - scores.lse.to(problem.wide);
    const at::Tensor logprob = logprob_of(y, exponents, log2_sum);
    if (!group.is_alone() && !are_targets_covered) CheckTargetOwners(rows_, sums[2], problem);
    const double without_target = rows_.is_unchecked && !options.out_of_vocab_is_zero ? kNan : 0;
    scores.logprob = at::where(sums[2] > 0, where_finite(logprob), without_target);
    if (options.need_entropy) {
      const at::Tensor entropy = (log2_sum - sums[3].to(at::kDouble) / sum).mul_(kernels::kLn2);
      const double entropy_max = std::log(static_cast<double>(problem.shard.vocab_size));
      scores.entropy = where_finite(entropy.clamp_(0, entropy_max));
    }
    if (options.need_target_rank) {
      const at::Tensor target_logit = sums[1].contiguous().view(at::kDouble);
      group.RunOnAllRanks(problem.device(),
                          [&] { scores.target_rank = CountAbove(target_logit, rows_, problem); });
      group.Sum(scores.target_rank);
      const at::Tensor has_rank = is_finite.logical_and(sums[2] > 0);
      scores.target_rank.masked_fill_(has_rank.logical_not(), -1);
    }
    if (options.top_k > 0) {
      const TopLogits top = MergeTop({stats_.top_logits, stats_.top_ids}, options.top_k, group);
      const at::Tensor is_missing =
          top.ids.eq(kNoColumn).logical_or_(is_finite.logical_not().unsqueeze(1));
      const at::Tensor top_y = top.logits * log2_scales.unsqueeze(1);
      const at::Tensor logprobs = logprob_of(top_y, exponents.unsqueeze(1), log2_sum.unsqueeze(1));
      scores.top_k_ids = top.ids.masked_fill(is_missing, -1);
      scores.top_k_logprobs = logprobs.masked_fill(is_missing, kNan);
    }
    if (rows_.candidates.defined()) {
      at::Tensor shared =
          at::stack({stats_.candidate_logit.view(at::kLong), stats_.has_candidate.to(at::kLong)});
      group.Sum(shared);
      const at::Tensor row = rows_.candidates.rows.clamp(0, rows_.size() - 1);
      const auto at_rows = [&](const at::Tensor& values) { return values.index_select(0, row); };
      const at::Tensor candidate_y = shared[0].view(at::kDouble) * at_rows(log2_scales);
      const at::Tensor logprobs = logprob_of(candidate_y, at_rows(exponents), at_rows(log2_sum));
      const at::Tensor is_known = at_rows(is_finite).logical_and(shared[1] > 0);
      const at::Tensor is_in_block = row == rows_.candidates.rows;
      scores.candidate_logprobs = at::where(is_in_block, at::where(is_known, logprobs, kNan), 0);
    }
    if (options.need_mean_logit) {
      scores.mean_logit = stats_.mean_logit;
      group.Sum(scores.mean_logit);
    }
    if (options.need_sum_p_squared) {
      const at::Tensor squares = sums[-1].to(at::kDouble).mul_(kFixedPointOne) / sum.square();
      scores.sum_p_squared = where_finite(squares.clamp_max_(1));
    }
    if (NeedsMax(options)) {
      at::Tensor max = stats_.max_logit.nan_to_num(kInfinity, kInfinity, -kInfinity);
      const at::Tensor mine = max.clone();
      group.Max(max);
      if (options.need_max_logit) scores.max_logit = where_finite(max);
      if (options.need_argmax) {
        scores.argmax = at::where(mine == max, stats_.argmax, kNoColumn);
        group.Min(scores.argmax);
        scores.argmax.masked_fill_(is_finite.logical_not(), -1);
      }
    }
    if (options.need_min_logit) {
      at::Tensor min = stats_.min_logit.nan_to_num(kInfinity, kInfinity, -kInfinity);
      group.Min(min);
      scores.min_logit = where_finite(min);
    }
    return scores;
  }

 private:
  const Rows rows_;
  BlockStats stats_;
  const at::Tensor cache_;    // the block's rows of a cache, or undefined
  at::Tensor max_exponents_;  // fp64 [n]: of this shard, then of all
};

// Gradients.

/// Per-row constants of the gradient
///   dx_j = p_j (free - d_entropy (ln p_j + entropy)) + target [j = t] + mean w_j
/// where p is the softmax, t the target and w the weights of the mean logit. Each is [n, 1] in the
/// wide dtype.
struct RowConstants {
  at::Tensor free;             ///< d_lse - d_logprob
  at::Tensor d_entropy;        ///< Undefined: 0.
  at::Tensor target;           ///< d_logprob; undefined: 0.
  at::Tensor mean;             ///< d_mean_logit; undefined: 0.
  at::Tensor entropy;          ///< Undefined if d_entropy is undefined.
  at::Tensor reference_logit;  ///< lse * temperature, rounded; close to the largest logits.
  at::Tensor rest;             ///< reference_logit / temperature - lse
  at::Tensor scale;            ///< 1 / temperature
};

RowConstants ConstantsOf(const BackwardRows& all, const Problem& problem) {
  const at::ScalarType wide = problem.wide;
  const Rows& rows = all.rows;
  RowConstants constants;
  const auto gather = [&](const at::Tensor& values) {
    return rows.GatherFromAll(values.reshape({-1})).to(wide).unsqueeze(1);
  };
  if (all.upstream.entropy.has_value()) {
    constants.d_entropy = gather(*all.upstream.entropy);
    constants.entropy = gather(all.saved.entropy);
  }
  if (all.upstream.mean_logit.has_value()) constants.mean = gather(*all.upstream.mean_logit);
  constants.free = at::zeros({rows.size(), 1}, rows.hidden.options().dtype(wide));
  if (all.upstream.lse.has_value()) constants.free = gather(*all.upstream.lse);
  if (all.upstream.logprob.has_value()) {
    constants.target = gather(*all.upstream.logprob);
    constants.free = constants.free - constants.target;
  }
  constants.scale = PerTemperature(1, rows, problem, wide);
  // Logits are used relative to a reference logit, because large logits would lose accuracy
  // otherwise: the rounding errors of lse and 1 / temperature would exceed the error that the
  // probabilities may have.
  const at::Tensor exact_scale = PerTemperature(1, rows, problem, at::kDouble);
  const at::Tensor lse = (all.saved.lse.to(at::kDouble) + all.saved.lse_rest).reshape({-1});
  const at::Tensor exact_lse = rows.GatherFromAll(lse).unsqueeze(1);
  constants.reference_logit = (exact_lse / exact_scale).to(wide);
  constants.rest = (constants.reference_logit.to(at::kDouble) * exact_scale - exact_lse).to(wide);
  return constants;
}

class TensorDotGradients : public DotGradients {
 public:
  explicit TensorDotGradients(const DotGradientsArguments& arguments)
      : arguments_(arguments), constants_(ConstantsOf(arguments.rows, arguments.problem)) {}

  Columns Next(int64_t begin) const override {
    return BlockOfColumns(arguments_.problem.shard, begin, arguments_.rows.rows.size());
  }

  at::Tensor Form(Columns columns) override {
    const LinearLogprobOptions& options = arguments_.problem.options;
    const LinearLogprobInputs& inputs = arguments_.problem.inputs;
    const at::Tensor logits = Logits(columns);
    at::Tensor gradient = GradientOfLogits(logits, columns);
    if (options.softcap > 0) {
      const at::Tensor t = logits / options.softcap;
      gradient.mul_(1 - t * t);  // the derivative of tanh
    }
    if (arguments_.bias_sum.defined()) {
      arguments_.bias_sum.narrow(0, columns.begin, columns.size()).add_(gradient.sum(0));
    }
    if (options.scale != 1) gradient.mul_(options.scale);
    return IsMultipliedInSixteenBits(inputs.hidden, inputs.weight)
               ? gradient.to(inputs.weight.scalar_type())
               : gradient;
  }

  std::vector<at::Tensor> HiddenTerms() const override { return {arguments_.rows.rows.hidden}; }

 private:
  at::Tensor Logits(Columns columns) const {
    const CachedRows& cached = arguments_.rows.cached;
    const at::Tensor& hidden = arguments_.rows.rows.hidden;
    const int64_t num_cached = cached.has_logits() ? cached.size() : 0;
    const int64_t num_others = hidden.size(0) - num_cached;
    if (num_others == 0 && num_cached > 0) return cached.Logits(columns);
    const at::Tensor others =
        BlockLogits(SliceRows(hidden, num_cached, num_others), arguments_.problem, columns);
    return num_cached > 0 ? at::cat({cached.Logits(columns), others}) : others;
  }

  /// Returns the gradient with respect to the logits before temperature.
  at::Tensor GradientOfLogits(const at::Tensor& logits, Columns columns) const {
    const Problem& problem = arguments_.problem;
    const at::Tensor log_p =
        (logits - constants_.reference_logit).mul_(constants_.scale).add_(constants_.rest);
    at::Tensor factor = constants_.free;
    if (constants_.d_entropy.defined()) {
      factor = factor - constants_.d_entropy * (log_p + constants_.entropy);
    }
    const at::Tensor p = log_p.exp();
    // A probability of 0 contributes no gradient, even if its logarithm is infinite.
    at::Tensor gradient = at::where(p == 0, 0, p * factor);
    if (constants_.target.defined()) {
      const auto [column, is_in_range] =
          FindTargets(arguments_.rows.rows, problem.shard.begin + columns.begin, columns.size());
      gradient.scatter_add_(1, column.unsqueeze(1), constants_.target * is_in_range.unsqueeze(1));
    }
    if (constants_.mean.defined()) {
      gradient.add_(constants_.mean * MeanLogitWeights(problem, columns).to(problem.wide));
    }
    return gradient.mul_(constants_.scale);
  }

  const DotGradientsArguments arguments_;
  const RowConstants constants_;
};

class TensorPath : public ScoringPath {
 public:
  bool is_fused() const override { return false; }

  int64_t BlockRows(const Problem& problem) const override {
    // A rank with an empty shard may not know yet how large the vocabulary is.
    const int64_t num_tiles = std::max<int64_t>(kernels::NumTiles(problem.shard.vocab_size), 1);
    return std::clamp<int64_t>(kBlockTileSums / num_tiles, 1, kBlockRows);
  }

  bool ScoresDuringCompaction(const Problem& /*problem*/) const override { return false; }

  bool DifferentiatesDuringCompaction(const UpstreamGradients& /*upstream*/,
                                      const Problem& /*problem*/) const override {
    return false;
  }

  void AlignInputs(LinearLogprobInputs& /*inputs*/) const override {}

  // Ranks share errors before each collective that follows large allocations.
  void ReserveMemory(int64_t /*num_rows*/, const Problem& /*problem*/) const override {}

  std::unique_ptr<PendingScores> StartScores(const Rows& block, const Problem& problem,
                                             const at::Tensor& cache) const override {
    return std::make_unique<TensorScores>(block, problem, cache);
  }

  std::unique_ptr<DotGradients> MakeDotGradients(
      const DotGradientsArguments& arguments) const override {
    return std::make_unique<TensorDotGradients>(arguments);
  }
};

}  // namespace

const ScoringPath& GetTensorPath() {
  static const TensorPath path;
  return path;
}

}  // namespace logprobd::torch_ops
