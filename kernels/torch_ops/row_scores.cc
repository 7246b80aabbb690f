#include "kernels/torch_ops/row_scores.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/logit_cache.h"
#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/tile_sums.h"
#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// Most sums of tiles that are held at a time, for every row and tile of a block of rows.
constexpr int64_t kBlockTileSums = int64_t{2} << 20;
constexpr int64_t kNoColumn = std::numeric_limits<int64_t>::max();

/// What this shard knows of a block of rows; [n] each, in fp64.
struct BlockKnowledge {
  TileSumsOf tiles;
  at::Tensor target_logit;  ///< 0 where another shard has the target.
  at::Tensor owned;         ///< bool: this one has it.
  at::Tensor max_logit;     ///< -inf for an empty shard; undefined unless needed.
  at::Tensor argmax;        ///< int64, lowest id with max_logit.
  at::Tensor mean_logit;    ///< Of x; undefined unless needed.
};

/// The target's logit where one of `columns` is it.
void TakeTargets(const at::Tensor& logits, const Rows& rows, int64_t first,
                 BlockKnowledge& knowledge) {
  const auto [column, is_here] = FindTargets(rows, first, logits.size(1));
  const at::Tensor logit = logits.gather(1, column.unsqueeze(1)).squeeze(1);
  knowledge.target_logit = at::where(is_here, logit.to(at::kDouble), knowledge.target_logit);
  knowledge.owned.logical_or_(is_here);
}

void TakeLargest(const at::Tensor& logits, int64_t first, BlockKnowledge& knowledge) {
  const auto [largest, column] = logits.max(1);
  const at::Tensor wide = largest.to(at::kDouble);
  // Strictly: among equals the lowest id wins. NaN takes over and stays.
  const at::Tensor is_larger = wide.gt(knowledge.max_logit).logical_or_(wide.isnan());
  knowledge.max_logit = at::where(is_larger, wide, knowledge.max_logit);
  knowledge.argmax = at::where(is_larger, column + first, knowledge.argmax);
}

/// `cache`, if defined, gets the rows' logits.
BlockKnowledge Know(const Rows& rows, const LinearLogprobInputs& inputs,
                    const LinearLogprobOptions& options, const Shard& shard,
                    const at::Tensor& cache) {
  const at::ScalarType wide = WideType(inputs);
  const at::Tensor log2_scales = PerTemperature(kLog2E, rows, options, at::kDouble);
  const auto zero = rows.all_targets.new_zeros({rows.size()}, at::kDouble);
  const int64_t first_tile = shard.begin / kernels::kTileColumns;
  const int64_t num_tiles =
      shard.columns == 0 ? 0 : kernels::NumTiles(shard.begin + shard.columns) - first_tile;
  BlockKnowledge knowledge;
  knowledge.tiles = RoomForTiles(zero, num_tiles, options.need_entropy);
  knowledge.target_logit = zero;
  knowledge.owned = rows.all_targets.new_zeros({rows.size()}, at::kBool);
  if (options.need_argmax) {
    knowledge.max_logit = at::full_like(zero, -kInfinity);
    knowledge.argmax = rows.all_targets.new_full({rows.size()}, kNoColumn);
  }
  if (options.need_mean_logit) knowledge.mean_logit = zero.clone();
  for (const Columns& columns : CutColumns(shard.columns, shard.begin, rows.size())) {
    const int64_t first = shard.begin + columns.begin;
    const at::Tensor logits = BlockLogits(rows.hidden, inputs, options, columns, wide);
    if (cache.defined()) KeepLogits(cache, columns, logits);
    SumTiles(logits, log2_scales, first, first / kernels::kTileColumns - first_tile,
             knowledge.tiles);
    TakeTargets(logits, rows, first, knowledge);
    if (options.need_argmax) TakeLargest(logits, first, knowledge);
    if (options.need_mean_logit) {
      knowledge.mean_logit += logits.to(at::kDouble).mv(shard.MeanLogitWeights(inputs, columns));
    }
  }
  if (options.need_mean_logit) {
    knowledge.mean_logit.mul_(log2_scales.squeeze(1)).mul_(kernels::kLn2);
  }
  return knowledge;
}

/// Scores of a block of rows, in fp64 but for argmax.
LinearLogprobOutputs Score(const Rows& rows, const BlockKnowledge& knowledge,
                           const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                           const Shard& shard, const RankGroup& group) {
  const TileSumsOf& tiles = knowledge.tiles;
  at::Tensor exponents =
      at::cat({tiles.exponent, at::full({rows.size(), 1}, -kInfinity, tiles.exponent.options())}, 1)
          .amax(1);
  // NaN counts as +inf, which every backend's maximum keeps.
  exponents.nan_to_num_(kInfinity, kInfinity, -kInfinity);
  group.Max(exponents);
  const FixedSums fixed = SumFixed(tiles, exponents);
  std::vector<at::Tensor> parts = {fixed.sum, knowledge.target_logit.view(at::kLong),
                                   knowledge.owned.to(at::kLong)};
  if (options.need_entropy) parts.push_back(fixed.weighted);
  at::Tensor sums = at::stack(parts);  // integers: exact, and a logit comes from its only owner
  group.Sum(sums);

  const at::Tensor is_finite = exponents.isfinite();
  const at::Tensor sum = sums[0].to(at::kDouble);
  const at::Tensor log2_sum = sum.div(kernels::kFixedPointOne).log2_();
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto where_finite = [&](const at::Tensor& values) {
    return at::where(is_finite, values, nan);
  };
  const at::Tensor log2_scales = PerTemperature(kLog2E, rows, options, at::kDouble).squeeze(1);
  const at::Tensor y = sums[1].contiguous().view(at::kDouble) * log2_scales;
  LinearLogprobOutputs scores;
  scores.lse = where_finite((exponents + log2_sum) * kernels::kLn2);
  scores.lse_rest = scores.lse - scores.lse.to(WideType(inputs));
  const at::Tensor logprob = ((y - exponents) - log2_sum).mul_(kernels::kLn2).clamp_max_(0);
  if (!group.is_alone() && !rows.are_owned) {
    CheckOwners(rows, sums[2], inputs, options, shard.vocab_size);
  }
  const double unowned = rows.are_unchecked && !options.out_of_vocab_is_zero ? nan : 0;
  scores.logprob = at::where(sums[2] > 0, where_finite(logprob), unowned);
  if (options.need_entropy) {
    const at::Tensor entropy = (log2_sum - sums[3].to(at::kDouble) / sum).mul_(kernels::kLn2);
    scores.entropy =
        where_finite(entropy.clamp_(0, std::log(static_cast<double>(shard.vocab_size))));
  }
  if (options.need_mean_logit) {
    scores.mean_logit = knowledge.mean_logit;
    group.Sum(scores.mean_logit);
  }
  if (options.need_argmax) {
    at::Tensor largest = knowledge.max_logit.nan_to_num(kInfinity, kInfinity, -kInfinity);
    const at::Tensor mine = largest.clone();
    group.Max(largest);
    scores.argmax = at::where(mine == largest, knowledge.argmax, kNoColumn);
    group.Min(scores.argmax);
    scores.argmax.masked_fill_(is_finite.logical_not(), -1);
  }
  return scores;
}

/// Of no rows.
LinearLogprobOutputs NoScores(const Rows& rows, const LinearLogprobOptions& options) {
  const at::Tensor none = rows.all_targets.new_zeros({0}, at::kDouble);
  LinearLogprobOutputs scores;
  scores.logprob = scores.lse = scores.lse_rest = none;
  if (options.need_entropy) scores.entropy = none;
  if (options.need_mean_logit) scores.mean_logit = none;
  if (options.need_argmax) scores.argmax = rows.all_targets.new_zeros({0});
  return scores;
}

/// Rows that are scored together.
struct Block {
  Rows rows;
  at::Tensor cache;  ///< What is theirs of it; or undefined.
};

/// `size` of the rows from `begin` on, or as many as there are.
Block BlockOf(const Rows& rows, int64_t begin, int64_t size, const LinearLogprobOptions& options,
              const at::Tensor& cache) {
  size = std::min(size, rows.size() - begin);
  Block block = {rows.Part(begin, size), {}};
  if (options.keep_logits != KeptLogits::kNone) block.cache = RowsFrom(cache, begin, size);
  return block;
}

/// Of kFusedBlockRows rows from `begin` on.
std::unique_ptr<PendingScores> BeginFusedBlock(const Rows& rows, int64_t begin,
                                               const LinearLogprobInputs& inputs,
                                               const LinearLogprobOptions& options,
                                               const Shard& shard, const at::Tensor& cache) {
  const Block block = BlockOf(rows, begin, kFusedBlockRows, options, cache);
  return BeginFusedScores(block.rows, inputs, options, shard, block.cache);
}

}  // namespace

void ReserveRoom(const RowSelection& selection, const LinearLogprobInputs& inputs,
                 const LinearLogprobOptions& options) {
  const int64_t num_all = inputs.target.numel();
  const int64_t hidden_size = inputs.weight.size(1);
  at::Tensor gathered;
  at::Tensor selected;  // as long as the others
  if (options.sequence_parallel) {
    gathered = at::empty({num_all, hidden_size}, inputs.hidden.options());
  }
  if (selection.index.defined()) {
    selected = at::empty({selection.size(num_all), hidden_size}, inputs.hidden.options());
  }
  // Other ways tell the group of every block (Together).
  if (IsForwardFused(inputs, options)) {
    ReserveFusedRoom(selection.size(num_all), inputs, options);
  }
}

std::unique_ptr<PendingScores> BeginScores(const Rows& rows, const LinearLogprobInputs& inputs,
                                           const LinearLogprobOptions& options, const Shard& shard,
                                           const at::Tensor& cache) {
  if (rows.size() == 0 || !IsForwardFused(inputs, options)) return nullptr;
  return BeginFusedBlock(rows, 0, inputs, options, shard, cache);
}

LinearLogprobOutputs ScoreRows(const Rows& rows, const LinearLogprobInputs& inputs,
                               const LinearLogprobOptions& options, const Shard& shard,
                               const RankGroup& group, const at::Tensor& cache,
                               std::unique_ptr<PendingScores> begun) {
  if (rows.size() == 0) return NoScores(rows, options);
  const bool is_fused = IsForwardFused(inputs, options);
  std::vector<LinearLogprobOutputs> blocks;
  // The same on every rank: a block takes as many collectives.
  const int64_t block_rows =
      is_fused ? kFusedBlockRows
               : std::clamp<int64_t>(kBlockTileSums / kernels::NumTiles(shard.vocab_size), 1,
                                     kBlockRows);
  for (int64_t begin = 0; begin < rows.size(); begin += block_rows) {
    if (is_fused) {
      // Nothing is enqueued between what begins and what joins: the one may overlap the other.
      if (begun == nullptr) begun = BeginFusedBlock(rows, begin, inputs, options, shard, cache);
      blocks.push_back(begun->Join(rows.are_owned, shard, group));
      begun.reset();  // its memory is the next one's
      continue;
    }
    const Block block = BlockOf(rows, begin, block_rows, options, cache);
    BlockKnowledge knowledge;
    group.Together(inputs.hidden.device(),
                   [&] { knowledge = Know(block.rows, inputs, options, shard, block.cache); });
    blocks.push_back(Score(block.rows, knowledge, inputs, options, shard, group));
  }
  return JoinScores(blocks);
}

LinearLogprobOutputs JoinScores(const std::vector<LinearLogprobOutputs>& blocks) {
  if (blocks.size() == 1) return blocks.front();
  const auto joined = [&](at::Tensor LinearLogprobOutputs::*member) -> at::Tensor {
    if (!(blocks.front().*member).defined()) return {};
    std::vector<at::Tensor> parts;
    parts.reserve(blocks.size());
    for (const LinearLogprobOutputs& block : blocks) parts.push_back(block.*member);
    return at::cat(parts);
  };
  LinearLogprobOutputs scores;
  for (const auto member : {&LinearLogprobOutputs::logprob, &LinearLogprobOutputs::entropy,
                            &LinearLogprobOutputs::lse, &LinearLogprobOutputs::argmax,
                            &LinearLogprobOutputs::mean_logit, &LinearLogprobOutputs::lse_rest}) {
    scores.*member = joined(member);
  }
  return scores;
}

LinearLogprobOutputs InPlaceOfAll(const LinearLogprobOutputs& scores, const Rows& rows,
                                  const LinearLogprobInputs& inputs,
                                  const LinearLogprobOptions& options) {
  const auto placed = [&](const at::Tensor& values, at::ScalarType dtype) {
    if (!values.defined()) return at::empty({0}, inputs.target.options().dtype(dtype));
    const at::Tensor all = rows.Spread(values.to(dtype));
    if (rows.are_unchecked) all.masked_fill_(rows.target() == options.ignore_index, 0);
    return all.view(inputs.target.sizes());
  };
  const at::ScalarType wide = WideType(inputs);
  return {placed(scores.logprob, wide),
          placed(scores.entropy, wide),
          placed(scores.lse, wide),
          placed(scores.argmax, at::kLong),
          placed(scores.mean_logit, wide),
          placed(scores.lse_rest, wide),
          scores.cache};
}

}  // namespace logprobd::torch_ops
