// Scores, a block of rows and columns at a time: logits -> sums of tiles -> sums of rows over all
// shards, in integers -> scores.

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/row_sums.h"
#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"
#include "kernels/torch_ops/tile_sums.h"

namespace logprobd::torch_ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kNoColumn = std::numeric_limits<int64_t>::max();

/// What this shard knows of a block of rows; [n] each, in fp64.
struct BlockKnowledge {
  std::vector<TileSumsOf> tiles;  ///< Of each block of columns.
  at::Tensor target_logit;        ///< 0 where another shard has the target.
  at::Tensor owned;               ///< bool: this one has it.
  at::Tensor max_logit;           ///< -inf for an empty shard; undefined unless needed.
  at::Tensor argmax;              ///< int64, lowest id with max_logit.
  at::Tensor mean_logit;          ///< Of x; undefined unless needed.
};

/// The sums of all tiles of the shard beside each other.
TileSumsOf Joined(const std::vector<TileSumsOf>& blocks, const Rows& rows, bool need_weighted) {
  const auto empty = rows.target.new_empty({rows.size(), 0}, at::kDouble);
  std::vector<at::Tensor> exponents = {empty}, sums = {empty}, weighted = {empty};
  for (const TileSumsOf& block : blocks) {
    exponents.push_back(block.exponent);
    sums.push_back(block.sum);
    if (need_weighted) weighted.push_back(block.weighted);
  }
  return {at::cat(exponents, 1), at::cat(sums, 1), at::cat(weighted, 1)};
}

/// The target's logit where one of `columns` is it.
void TakeTargets(const at::Tensor& logits, const Rows& rows, int64_t first,
                 BlockKnowledge& knowledge) {
  const at::Tensor column = rows.target - first;
  const at::Tensor is_here = column.ge(0).logical_and_(column.lt(logits.size(1)));
  const at::Tensor logit =
      logits.gather(1, column.clamp(0, logits.size(1) - 1).unsqueeze(1)).squeeze(1);
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

BlockKnowledge Know(const Rows& rows, const LinearLogprobInputs& inputs,
                    const LinearLogprobOptions& options, const Shard& shard) {
  const at::ScalarType wide = WideType(inputs);
  const at::Tensor log2_scales = Log2Scales(rows, options, wide);
  const auto zero = rows.target.new_zeros({rows.size()}, at::kDouble);
  BlockKnowledge knowledge;
  knowledge.target_logit = zero;
  knowledge.owned = rows.target.new_zeros({rows.size()}, at::kBool);
  if (options.need_argmax) {
    knowledge.max_logit = at::full_like(zero, -kInfinity);
    knowledge.argmax = at::full_like(rows.target, kNoColumn);
  }
  if (options.need_mean_logit) knowledge.mean_logit = zero.clone();
  for (const Columns& columns : CutColumns(shard.columns, shard.begin, rows.size())) {
    const int64_t first = shard.begin + columns.begin;
    const at::Tensor logits = BlockLogits(rows.hidden, inputs, options, columns, wide);
    knowledge.tiles.push_back(SumTiles(logits, log2_scales, first, options.need_entropy));
    TakeTargets(logits, rows, first, knowledge);
    if (options.need_argmax) TakeLargest(logits, first, knowledge);
    if (options.need_mean_logit) {
      knowledge.mean_logit += logits.to(at::kDouble).mv(shard.ColumnWeights(inputs, columns));
    }
  }
  if (options.need_mean_logit) {
    knowledge.mean_logit.mul_(log2_scales.squeeze(1).to(at::kDouble)).mul_(kernels::kLn2);
  }
  return knowledge;
}

/// Scores of a block of rows, in fp64 but for argmax.
LinearLogprobOutputs Score(const Rows& rows, BlockKnowledge knowledge,
                           const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                           const Shard& shard, const RankGroup& group) {
  const TileSumsOf tiles = Joined(knowledge.tiles, rows, options.need_entropy);
  at::Tensor exponents =
      at::cat({tiles.exponent, at::full({rows.size(), 1}, -kInfinity, tiles.exponent.options())}, 1)
          .amax(1);
  // NaN counts as +inf, which every backend's maximum keeps.
  exponents.nan_to_num_(kInfinity, kInfinity, -kInfinity);
  group.Max(exponents);
  std::vector<at::Tensor> parts = {FixedSums(tiles, exponents),
                                   knowledge.target_logit.view(at::kLong),
                                   knowledge.owned.to(at::kLong)};
  if (options.need_entropy) parts.push_back(FixedWeighted(tiles, exponents));
  at::Tensor sums = at::stack(parts);  // integers: exact, and a logit comes from its only owner
  group.Sum(sums);

  const at::Tensor is_finite = exponents.isfinite();
  const at::Tensor sum = sums[0].to(at::kDouble);
  const at::Tensor log2_sum = sum.div(kernels::kFixedPointOne).log2_();
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto where_finite = [&](const at::Tensor& values) {
    return at::where(is_finite, values, nan);
  };
  const at::Tensor log2_scales =
      Log2Scales(rows, options, WideType(inputs)).squeeze(1).to(at::kDouble);
  const at::Tensor y = sums[1].contiguous().view(at::kDouble) * log2_scales;
  LinearLogprobOutputs scores;
  scores.lse = where_finite((exponents + log2_sum) * kernels::kLn2);
  const at::Tensor logprob = ((y - exponents) - log2_sum).mul_(kernels::kLn2).clamp_max_(0);
  scores.logprob = at::where(sums[2] > 0, where_finite(logprob), 0);
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

/// Blocks of rows, one after another.
Rows BlockOf(const Rows& rows, int64_t begin) {
  const int64_t size = std::min(kBlockRows, rows.size() - begin);
  Rows block;
  block.hidden = rows.hidden.narrow(0, begin, size);
  block.target = rows.target.narrow(0, begin, size);
  if (rows.temperature.defined()) block.temperature = rows.temperature.narrow(0, begin, size);
  return block;
}

}  // namespace

LinearLogprobOutputs Forward(const LinearLogprobInputs& inputs,
                             const LinearLogprobOptions& options) {
  const RankGroup group(options.group);
  const at::Device device = inputs.hidden.device();
  group.Together(device, [&] { CheckArguments(inputs, options, group); });
  const Shard shard(inputs, options, group);
  at::Tensor hidden = inputs.hidden.reshape({-1, inputs.hidden.size(-1)});
  if (options.sequence_parallel) hidden = group.Gather(hidden);
  Rows rows;
  group.Together(device, [&] {
    rows = RowsThatCount(hidden, inputs, options, /*wanted=*/{});
    if (!options.unowned_is_zero) CheckTargets(rows, shard.vocab_size);
  });

  const auto scores = inputs.target.options().dtype(WideType(inputs));
  const auto none = at::empty({0}, scores);
  std::vector<LinearLogprobOutputs> blocks;
  for (int64_t begin = 0; begin < rows.size(); begin += kBlockRows) {
    const Rows block = BlockOf(rows, begin);
    BlockKnowledge knowledge;
    group.Together(device, [&] { knowledge = Know(block, inputs, options, shard); });
    blocks.push_back(Score(block, std::move(knowledge), inputs, options, shard, group));
  }
  const auto whole = [&](at::Tensor LinearLogprobOutputs::*member, bool is_needed,
                         at::ScalarType dtype) {
    if (!is_needed) return none.to(dtype);
    std::vector<at::Tensor> parts;
    for (const LinearLogprobOutputs& block : blocks) parts.push_back(block.*member);
    if (parts.empty()) return at::zeros(inputs.target.sizes(), scores.dtype(dtype));
    return rows.Spread(at::cat(parts).to(dtype)).view(inputs.target.sizes());
  };
  const at::ScalarType wide = WideType(inputs);
  return {whole(&LinearLogprobOutputs::logprob, true, wide),
          whole(&LinearLogprobOutputs::entropy, options.need_entropy, wide),
          whole(&LinearLogprobOutputs::lse, true, wide),
          whole(&LinearLogprobOutputs::argmax, options.need_argmax, at::kLong),
          whole(&LinearLogprobOutputs::mean_logit, options.need_mean_logit, wide)};
}

}  // namespace logprobd::torch_ops
