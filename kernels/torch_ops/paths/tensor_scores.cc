// Computes scores with tensor operations: logits of a block of rows and columns -> sums of tiles ->
// sums of rows over all shards -> scores. The sums of rows are integers, so that every grouping
// gives bit-identical sums.

#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/paths/tensor_path.h"
#include "kernels/torch_ops/paths/tile_stats.h"
#include "kernels/torch_ops/paths/top_logits.h"
#include "kernels/torch_ops/ranks/rank_group.h"
#include "kernels/torch_ops/rows/listed_pairs.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {
namespace {

using kernels::kFixedPointOne;
using kernels::kTileColumns;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
/// Largest number of (row, tile) sums that exist at a time.
constexpr int64_t kBlockTileSums = int64_t{2} << 20;

/// Statistics of a block of rows over the columns of this shard; [n] each, fp64 unless noted.
struct BlockStats {
  TileStats tiles;
  at::Tensor target_logit;  ///< 0 when another shard has the target.
  at::Tensor has_target;    ///< bool: whether this shard has the target.
  at::Tensor max_logit;     ///< -inf for an empty shard; undefined unless needed.
  at::Tensor argmax;        ///< int64: the lowest id with max_logit.
  at::Tensor min_logit;     ///< +inf for an empty shard; undefined unless needed.
  at::Tensor mean_logit;    ///< Mean of x; undefined unless needed.
  TopLogits top;            ///< Undefined unless needed.
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
    stats.top = {zero.new_zeros({rows.size(), 0}), rows.all_targets.new_zeros({rows.size(), 0})};
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
    if (options.top_k > 0) stats.top = AddToTop(stats.top, logits, first, options.top_k);
    if (options.need_min_logit) {
      stats.min_logit = stats.min_logit.minimum(logits.amin(1).to(at::kDouble));
    }
    if (options.need_mean_logit) {
      stats.mean_logit += logits.to(at::kDouble).mv(MeanLogitWeights(problem, columns));
    }
  }
  if (options.need_mean_logit) stats.mean_logit.mul_(log2_scales.squeeze(1)).mul_(kernels::kLn2);
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

/// What the scores of a block of rows are computed from, over all shards; [n] each, fp64 unless
/// noted.
struct RowTotals {
  at::Tensor exponents;     ///< The largest of the tiles' exponents.
  at::Tensor is_finite;     ///< bool: whether all logits are numbers, and one is above -inf.
  at::Tensor log2_sum;      ///< Logarithm of the sum of 2^(y - exponent).
  at::Tensor log2_scales;   ///< log2(e) / temperature
  at::Tensor target_logit;  ///< 0 if no shard has the target.
  at::Tensor num_owners;    ///< int64: the number of shards that have the target.
};

/// Returns the logprobs of logits with y = logit * log2_scales.
at::Tensor LogprobsOf(const at::Tensor& y, const at::Tensor& exponents,
                      const at::Tensor& log2_sum) {
  return ((y - exponents) - log2_sum).mul_(kernels::kLn2).clamp_max_(0);
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

  LinearLogprobOutputs Join(const Rows& block, const Problem& problem) override {
    const LinearLogprobOptions& options = problem.options;
    const RankGroup& group = problem.group;
    group.Max(max_exponents_);
    at::Tensor sums;
    group.RunOnAllRanks(problem.device(), [&] {
      const FixedSums fixed = SumRows(stats_.tiles, max_exponents_);
      std::vector<at::Tensor> parts = {fixed.sum, stats_.target_logit.view(at::kLong),
                                       stats_.has_target.to(at::kLong)};
      if (options.need_entropy) parts.push_back(fixed.weighted);
      if (options.need_sum_p_squared) parts.push_back(fixed.squares);
      sums = at::stack(parts);
    });
    // Sums of integers are exact. This also holds for the bits of the target's logit, which are 0
    // on all ranks but one.
    group.Sum(sums);

    const at::Tensor sum = sums[0].to(at::kDouble);
    const RowTotals totals = {
        .exponents = max_exponents_,
        .is_finite = max_exponents_.isfinite(),
        .log2_sum = sum.div(kFixedPointOne).log2_(),
        .log2_scales = PerTemperature(kLog2E, rows_, problem, at::kDouble).squeeze(1),
        .target_logit = sums[1].contiguous().view(at::kDouble),
        .num_owners = sums[2]};
    const auto where_finite = [&](const at::Tensor& values) {
      return at::where(totals.is_finite, values, kNan);
    };
    LinearLogprobOutputs scores;
    scores.lse = where_finite((totals.exponents + totals.log2_sum) * kernels::kLn2);
    scores.lse_rest = scores.lse - scores.lse.to(problem.wide);
    const at::Tensor logprob =
        LogprobsOf(totals.target_logit * totals.log2_scales, totals.exponents, totals.log2_sum);
    if (!group.is_alone() && !block.are_targets_covered) {
      CheckTargetOwners(rows_, totals.num_owners, problem);
    }
    const double without_target = rows_.is_unchecked && !options.out_of_vocab_is_zero ? kNan : 0;
    scores.logprob = at::where(totals.num_owners > 0, where_finite(logprob), without_target);
    if (options.need_entropy) {
      const at::Tensor entropy =
          (totals.log2_sum - sums[3].to(at::kDouble) / sum).mul_(kernels::kLn2);
      const double entropy_max = std::log(static_cast<double>(problem.shard.vocab_size));
      scores.entropy = where_finite(entropy.clamp_(0, entropy_max));
    }
    if (options.need_target_rank) scores.target_rank = TargetRanks(totals, problem);
    if (options.top_k > 0) AddTop(totals, problem, scores);
    if (rows_.candidates.defined()) scores.candidate_logprobs = CandidateLogprobs(totals, problem);
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
        scores.argmax.masked_fill_(totals.is_finite.logical_not(), -1);
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
  at::Tensor TargetRanks(const RowTotals& totals, const Problem& problem) const {
    at::Tensor rank;
    problem.group.RunOnAllRanks(problem.device(),
                                [&] { rank = CountAbove(totals.target_logit, rows_, problem); });
    problem.group.Sum(rank);
    const at::Tensor has_rank = totals.is_finite.logical_and(totals.num_owners > 0);
    return rank.masked_fill_(has_rank.logical_not(), -1);
  }

  void AddTop(const RowTotals& totals, const Problem& problem, LinearLogprobOutputs& scores) const {
    const TopLogits top = MergeTop(stats_.top, problem.options.top_k, problem.group);
    const at::Tensor is_missing =
        top.ids.eq(kNoColumn).logical_or_(totals.is_finite.logical_not().unsqueeze(1));
    const at::Tensor logprobs =
        LogprobsOf(top.logits * totals.log2_scales.unsqueeze(1), totals.exponents.unsqueeze(1),
                   totals.log2_sum.unsqueeze(1));
    scores.top_k_ids = top.ids.masked_fill(is_missing, -1);
    scores.top_k_logprobs = logprobs.masked_fill(is_missing, kNan);
  }

  at::Tensor CandidateLogprobs(const RowTotals& totals, const Problem& problem) const {
    at::Tensor shared =
        at::stack({stats_.candidate_logit.view(at::kLong), stats_.has_candidate.to(at::kLong)});
    problem.group.Sum(shared);
    const at::Tensor row = rows_.candidates.rows.clamp(0, rows_.size() - 1);
    const auto at_rows = [&](const at::Tensor& values) { return values.index_select(0, row); };
    const at::Tensor logprobs =
        LogprobsOf(shared[0].view(at::kDouble) * at_rows(totals.log2_scales),
                   at_rows(totals.exponents), at_rows(totals.log2_sum));
    const at::Tensor is_known = at_rows(totals.is_finite).logical_and(shared[1] > 0);
    const at::Tensor is_in_block = row == rows_.candidates.rows;
    return at::where(is_in_block, at::where(is_known, logprobs, kNan), 0);
  }

  const Rows rows_;
  BlockStats stats_;
  at::Tensor max_exponents_;  // fp64 [n]: of this shard, then of all
};

}  // namespace

int64_t TensorPath::BlockRows(const Problem& problem) const {
  // A rank with an empty shard may not know yet how large the vocabulary is.
  const int64_t num_tiles = std::max<int64_t>(kernels::NumTiles(problem.shard.vocab_size), 1);
  return std::clamp<int64_t>(kBlockTileSums / num_tiles, 1, kBlockRows);
}

std::unique_ptr<PendingScores> TensorPath::StartScores(const Rows& block, const Problem& problem,
                                                       const at::Tensor& cache) const {
  return std::make_unique<TensorScores>(block, problem, cache);
}

const ScoringPath& GetTensorPath() {
  static const TensorPath path;
  return path;
}

}  // namespace logprobd::torch_ops
