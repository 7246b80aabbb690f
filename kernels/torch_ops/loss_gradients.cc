// A block of rows at a time: scores, with logits kept -> gradients from these.

#include "kernels/torch_ops/loss_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "kernels/torch_ops/agreement.h"
#include "kernels/torch_ops/backward_rows.h"
#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/fused_row_loss.h"
#include "kernels/torch_ops/fused_scale.h"
#include "kernels/torch_ops/gradient_sums.h"
#include "kernels/torch_ops/logit_cache.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/row_scores.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"
#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

template <typename Change>
UpstreamGradients Changed(const UpstreamGradients& weights, const Change& change) {
  const auto changed = [&](const MaybeTensor& values) {
    return values.has_value() ? MaybeTensor(change(*values)) : std::nullopt;
  };
  return {changed(weights.logprob), changed(weights.entropy), changed(weights.lse),
          changed(weights.mean_logit)};
}

/// Rows as if they were all that the operator was called with; each counts.
LinearLogprobInputs InputsOf(const Rows& rows, const LinearLogprobInputs& inputs) {
  LinearLogprobInputs part = inputs;
  part.hidden = rows.hidden;
  part.target = rows.target();
  if (rows.temperature.defined()) part.row_temperature = rows.temperature;
  return part;
}

/// Whether a row's gradients are its powers times one factor, but for the target's.
bool AreGradientsPowers(const LossWeights& weights, GradientNeeds needs,
                        const LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  const auto [logprob, entropy, lse, mean_logit] = weights.factors;
  const bool is_logprob_alone = logprob != 0 && entropy == 0 && lse == 0 && mean_logit == 0;
  // The bias's gradient adds up columns whose rows have their factors yet to get.
  return is_logprob_alone && !needs.bias && options.softcap == 0 &&
         inputs.hidden.scalar_type() == at::kBFloat16;  // fp16 has not the powers' range
}

/// What is computed for the loss, whatever is returned.
LinearLogprobOptions OptionsOf(const LossWeights& weights, GradientNeeds needs,
                               const LinearLogprobInputs& inputs, LinearLogprobOptions options) {
  options.need_entropy |= weights.factors[1] != 0;
  options.need_mean_logit |= weights.factors[3] != 0;
  if (!needs.hidden && !needs.weight && !needs.bias) options.keep_logits = KeptLogits::kNone;
  if (options.keep_logits == KeptLogits::kPowers &&
      AreGradientsPowers(weights, needs, inputs, options)) {
    options.keep_logits = KeptLogits::kLeveledPowers;
  }
  return options;
}

/// How many of `num_rows` rows' logits this rank can keep at a time.
int64_t RowsThatFit(int64_t num_rows, const LinearLogprobInputs& inputs,
                    const LinearLogprobOptions& options, int64_t cache_bytes) {
  const LogitCacheFormat format = FormatOfLogitCache(inputs, options);
  const int64_t row_bytes =
      format.pitch.expect_int() * static_cast<int64_t>(c10::elementSize(format.dtype));
  return row_bytes == 0 ? num_rows : std::min(num_rows, cache_bytes / row_bytes);
}

/// Parts of one size, of `most` rows or fewer.
int64_t BlockSize(int64_t num_rows, int64_t most) {
  most = std::max<int64_t>(most, 1);
  const int64_t num_blocks = std::max<int64_t>((num_rows + most - 1) / most, 1);
  return (num_rows + num_blocks - 1) / num_blocks;
}

/// Adds the gradients of a block's `reached` rows; sums.hidden has all rows of the block.
void AddReached(const BackwardRows& reached, const LinearLogprobInputs& inputs,
                const LinearLogprobOptions& options, const Shard& shard, GradientSums& sums) {
  const at::Tensor hidden = sums.hidden;
  const bool is_part = hidden.defined() && reached.rows.index.defined();
  if (is_part) sums.hidden = at::empty({reached.rows.size(), hidden.size(1)}, hidden.options());
  AddGradients(reached, inputs, options, shard, sums);
  if (is_part) at::Tensor(hidden).zero_().index_copy_(0, reached.rows.index, sums.hidden);
}

/// []; the scores and weights are of the same rows.
at::Tensor LossOf(const LinearLogprobOutputs& scores, const UpstreamGradients& weights) {
  if (const auto loss = RowLossOnGpu(scores, weights)) return *loss;
  at::Tensor loss = at::zeros({}, scores.logprob.options().dtype(at::kDouble));
  const auto add = [&](const at::Tensor& score, const MaybeTensor& weight) {
    if (!weight.has_value()) return;
    const at::Tensor wide = weight->to(at::kDouble);
    loss += at::where(wide == 0, 0, wide * score).sum();
  };
  add(scores.logprob, weights.logprob);
  add(scores.entropy, weights.entropy);
  add(scores.lse, weights.lse);
  add(scores.mean_logit, weights.mean_logit);
  return loss;
}

/// The pass over blocks of rows.
class Pass {
 public:
  /// `are_all_reached`: no weights of a row that is run are all 0.
  Pass(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options, GradientNeeds needs,
       const Shard& shard, const RankGroup& group, bool are_all_reached)
      : inputs_(inputs),
        options_(options),
        needs_(needs),
        shard_(shard),
        group_(group),
        are_all_reached_(are_all_reached) {}

  /// Scores of `rows`. A rank that fails makes every one throw.
  LinearLogprobOutputs Run(const Rows& rows, const LossWeights& weights, int64_t block_rows) {
    std::vector<LinearLogprobOutputs> blocks;
    Attempt attempt;
    int64_t begin = 0;
    do {
      const int64_t size = std::min(block_rows, rows.size() - begin);
      const Rows block = rows.Part(begin, size);
      const LinearLogprobInputs block_inputs = InputsOf(block, inputs_);
      // Behind it a rank that fails would leave the others in the collectives of the scores.
      group_.Together(inputs_.hidden.device(), [&] {
        if (begin == 0) cache_ = RoomForLogits(block_inputs, options_);
        if (!group_.is_alone()) ReserveRoom({}, block_inputs, options_);
      });
      blocks.push_back(ScoreRows(block, inputs_, options_, shard_, group_, cache_));
      attempt([&] {
        // Behind the block's kernels, which run meanwhile.
        if (begin == 0) row_weights_ = WeightsOfRows(weights, rows, inputs_, options_);
        const auto block_weights = Changed(
            row_weights_, [&](const at::Tensor& all) { return RowsFrom(all, begin, size); });
        Differentiate(block, blocks.back(), block_weights, block_inputs, begin, rows.size());
      });
      begin += size;
    } while (begin < rows.size());
    group_.Together(inputs_.hidden.device(), [&] { attempt.Rethrow(false); });
    cache_.reset();
    return JoinScores(blocks);
  }

  const GradientSums& sums() const { return sums_; }
  /// [n] each, of the rows that were run.
  const UpstreamGradients& row_weights() const { return row_weights_; }

 private:
  void Differentiate(const Rows& block, const LinearLogprobOutputs& scores,
                     const UpstreamGradients& weights, const LinearLogprobInputs& block_inputs,
                     int64_t begin, int64_t num_rows) {
    if (!needs_.hidden && !needs_.weight && !needs_.bias) return;
    const at::ScalarType wide = WideType(inputs_);
    SavedOutputs saved = {scores.lse.to(wide), scores.lse_rest.to(wide), scores.entropy, {}};
    if (saved.entropy.defined()) saved.entropy = saved.entropy.to(wide);
    if (options_.keep_logits != KeptLogits::kNone) {
      saved.cache = RowsFrom(cache_, 0, block.size());
      saved.is_cache_spent = true;
    }
    RowSelection selection = {.are_unseen = block.are_unseen};
    if (!are_all_reached_) {
      selection = SelectRows(block.target(), options_.ignore_index, weights, /*owned=*/{});
    }
    const BackwardRows reached =
        RowsReached(selection, block.hidden, weights, block_inputs, saved, options_);
    if (begin == 0) {
      const bool is_all = block.size() == num_rows && AreAddedAtOnce(reached.rows.size());
      sums_ = RoomForGradients(inputs_, shard_, needs_, std::nullopt, num_rows, is_all);
    }
    GradientSums block_sums = sums_;
    if (needs_.hidden) {
      block_sums.hidden = RowsFrom(sums_.hidden, begin, block.size());
    }
    AddReached(reached, block_inputs, options_, shard_, block_sums);
    sums_.weight_into = block_sums.weight_into;
  }

  const LinearLogprobInputs& inputs_;
  const LinearLogprobOptions& options_;
  const GradientNeeds needs_;
  const Shard& shard_;
  const RankGroup& group_;
  const bool are_all_reached_;
  at::Tensor cache_;
  UpstreamGradients row_weights_;
  GradientSums sums_;
};

}  // namespace

LinearLogprobLoss ForwardWithGradients(const LossWeights& weights,
                                       const LinearLogprobInputs& inputs,
                                       const LinearLogprobOptions& options, GradientNeeds needs,
                                       int64_t cache_bytes) {
  // Dtypes are those written here, whatever autocast would make of them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const RankGroup group(options.group);
  const LinearLogprobOptions computed = OptionsOf(weights, needs, inputs, options);
  bool are_all_reached = false;
  const Agreement agreed = AgreeOnRows(group, inputs, options, [&] {
    CheckWeights(weights, inputs);
    Preparation mine;
    // Mostly all rows that count have a weight: looked for at once, they need not be again.
    mine.selection = SelectCountedRows(inputs, options, group, DecidingWeights(weights));
    are_all_reached = mine.selection.has_all_counted;
    if (!are_all_reached) {
      mine.selection = SelectCountedRows(inputs, options, group, /*upstream=*/{});
    }
    mine.common = {needs.hidden, weights.is_mean};
    for (const double factor : weights.factors) {
      mine.common.push_back(std::bit_cast<int64_t>(factor));
    }
    const int64_t num_rows = mine.selection.size(inputs.target.numel());
    mine.rows_at_a_time = RowsThatFit(num_rows, inputs, computed, cache_bytes);
    return mine;
  });
  const Rows& rows = agreed.rows;
  Pass pass(inputs, computed, needs, agreed.shard, group, are_all_reached);
  LinearLogprobOutputs scores =
      pass.Run(rows, weights, BlockSize(rows.size(), agreed.rows_at_a_time));
  LinearLogprobLoss result;
  result.loss = LossOf(scores, pass.row_weights()).to(WideType(inputs));
  if (!options.need_entropy) scores.entropy.reset();
  if (!options.need_mean_logit) scores.mean_logit.reset();
  result.scores = InPlaceOfAll(scores, rows, inputs, options);
  result.gradients = OverRanks(pass.sums(), rows, inputs, options, group);
  return result;
}

void ScaleGradient(at::Tensor& gradient, const at::Tensor& factor) {
  TORCH_CHECK_VALUE(factor.numel() == 1, "factor has the shape ", factor.sizes(),
                    ": it must have one element");
  if (ScaleOnGpu(gradient, factor)) return;
  // Looking at one on a GPU would wait for it.
  if (factor.is_cpu() && factor.item<double>() == 1) return;
  gradient.mul_(factor.reshape({}));
}

}  // namespace logprobd::torch_ops
