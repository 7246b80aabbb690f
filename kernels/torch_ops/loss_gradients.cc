// A block of rows at a time: scores, with logits kept -> gradients from these.

#include "kernels/torch_ops/loss_gradients.h"

#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels/torch_ops/backward_rows.h"
#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/fused_scale.h"
#include "kernels/torch_ops/gradient_sums.h"
#include "kernels/torch_ops/logit_cache.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/row_scores.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

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

/// Sizes may be symbolic.
void CheckWeight(const MaybeTensor& values, const char* name, const LinearLogprobInputs& inputs) {
  if (!values.has_value()) return;
  TORCH_CHECK_VALUE(values->sym_sizes() == inputs.target.sym_sizes(), name, " has the shape ",
                    values->sym_sizes(), " and target ", inputs.target.sym_sizes(),
                    ": it must be the same");
  TORCH_CHECK_VALUE(values->is_floating_point(), name, " is ", values->scalar_type(),
                    ": it must hold real numbers");
  TORCH_CHECK_VALUE(values->device() == inputs.hidden.device(), name, " is on ", values->device(),
                    " and hidden on ", inputs.hidden.device());
}

/// Of `rows`, [n] each; 0 where a row is ignored and yet among them (RowsThatCount, graphs).
UpstreamGradients OfRows(const UpstreamGradients& weights, const Rows& rows,
                         const LinearLogprobOptions& options) {
  const at::Tensor is_ignored =
      rows.are_unseen ? rows.target == options.ignore_index : at::Tensor();
  return Changed(weights, [&](const at::Tensor& all) {
    const at::Tensor selected = rows.Select(all.reshape({-1}));
    return is_ignored.defined() ? selected.masked_fill(is_ignored, 0) : selected;
  });
}

/// Rows as if they were all that the operator was called with; each counts.
LinearLogprobInputs InputsOf(const Rows& rows, const LinearLogprobInputs& inputs) {
  LinearLogprobInputs part = inputs;
  part.hidden = rows.hidden;
  part.target = rows.target;
  if (rows.temperature.defined()) part.row_temperature = rows.temperature;
  return part;
}

/// What is computed for the loss, whatever is returned.
LinearLogprobOptions OptionsOf(const UpstreamGradients& weights, GradientNeeds needs,
                               LinearLogprobOptions options) {
  options.need_entropy |= weights.entropy.has_value();
  options.need_mean_logit |= weights.mean_logit.has_value();
  if (!needs.hidden && !needs.weight && !needs.bias) options.keep_logits = KeptLogits::kNone;
  return options;
}

/// How many of `num_rows` rows are computed at a time, on every rank as many: parts of one size
/// whose caches fit.
int64_t BlockSize(int64_t num_rows, const LinearLogprobInputs& inputs,
                  const LinearLogprobOptions& options, int64_t cache_bytes,
                  const RankGroup& group) {
  const LogitCacheFormat format = FormatOfLogitCache(inputs, options);
  const int64_t row_bytes =
      format.pitch.expect_int() * static_cast<int64_t>(c10::elementSize(format.dtype));
  int64_t most = row_bytes == 0 ? num_rows : std::min(num_rows, cache_bytes / row_bytes);
  if (!group.is_alone()) {
    at::Tensor fit = at::full({1}, most, inputs.hidden.options().dtype(at::kLong));
    group.Min(fit);
    most = fit.item<int64_t>();
  }
  most = std::max<int64_t>(most, 1);
  const int64_t num_blocks = std::max<int64_t>((num_rows + most - 1) / most, 1);
  return (num_rows + num_blocks - 1) / num_blocks;
}

/// Adds the gradients of a block's `reached` rows; sums.hidden has all rows of the block.
void AddReached(const BackwardRows& reached, const LinearLogprobInputs& inputs,
                const LinearLogprobOptions& options, const Shard& shard, GradientSums sums) {
  const at::Tensor hidden = sums.hidden;
  const bool is_part = hidden.defined() && reached.rows.index.defined();
  if (is_part) sums.hidden = at::empty({reached.rows.size(), hidden.size(1)}, hidden.options());
  AddGradients(reached, inputs, options, shard, sums);
  if (is_part) at::Tensor(hidden).zero_().index_copy_(0, reached.rows.index, sums.hidden);
}

/// [] in fp64; the scores and weights are of the same rows.
at::Tensor LossOf(const LinearLogprobOutputs& scores, const UpstreamGradients& weights) {
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
  Pass(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options, GradientNeeds needs,
       const Shard& shard, const RankGroup& group)
      : inputs_(inputs), options_(options), needs_(needs), shard_(shard), group_(group) {}

  /// Scores of `rows`; `weights`, [n] each, are theirs.
  LinearLogprobOutputs Run(const Rows& rows, const UpstreamGradients& weights, int64_t block_rows) {
    std::vector<LinearLogprobOutputs> blocks;
    int64_t begin = 0;
    do {
      const int64_t size = std::min(block_rows, rows.size() - begin);
      const Rows block = rows.Part(begin, size);
      const auto block_weights =
          Changed(weights, [&](const at::Tensor& all) { return all.narrow(0, begin, size); });
      const LinearLogprobInputs block_inputs = InputsOf(block, inputs_);
      group_.Together(inputs_.hidden.device(), [&] {
        if (begin == 0) cache_ = RoomForLogits(block_inputs, options_);
      });
      blocks.push_back(ScoreRows(block, inputs_, options_, shard_, group_, cache_));
      group_.Together(inputs_.hidden.device(), [&] {
        Differentiate(block, blocks.back(), block_weights, block_inputs, begin, rows.size());
      });
      begin += size;
    } while (begin < rows.size());
    cache_.reset();
    return JoinScores(blocks);
  }

  const GradientSums& sums() const { return sums_; }

 private:
  void Differentiate(const Rows& block, const LinearLogprobOutputs& scores,
                     const UpstreamGradients& weights, const LinearLogprobInputs& block_inputs,
                     int64_t begin, int64_t num_rows) {
    if (!needs_.hidden && !needs_.weight && !needs_.bias) return;
    const at::ScalarType wide = WideType(inputs_);
    SavedOutputs saved = {scores.lse.to(wide), scores.lse_rest.to(wide), scores.entropy, {}};
    if (saved.entropy.defined()) saved.entropy = saved.entropy.to(wide);
    if (options_.keep_logits != KeptLogits::kNone) {
      saved.cache = cache_.narrow(0, 0, block.size());
      saved.is_cache_spent = true;
    }
    const BackwardRows reached = RowsReached(block.hidden, weights, block_inputs, saved, options_);
    if (begin == 0) {
      const bool is_all = block.size() == num_rows && AreAddedAtOnce(reached.rows.size());
      sums_ = RoomForGradients(inputs_, shard_, needs_, std::nullopt, num_rows, is_all);
    }
    GradientSums block_sums = sums_;
    if (needs_.hidden) block_sums.hidden = sums_.hidden.narrow(0, begin, block.size());
    AddReached(reached, block_inputs, options_, shard_, block_sums);
  }

  const LinearLogprobInputs& inputs_;
  const LinearLogprobOptions& options_;
  const GradientNeeds needs_;
  const Shard& shard_;
  const RankGroup& group_;
  at::Tensor cache_;
  GradientSums sums_;
};

}  // namespace

void CheckWeights(const UpstreamGradients& weights, const LinearLogprobInputs& inputs) {
  TORCH_CHECK_VALUE(
      weights.logprob || weights.entropy || weights.lse || weights.mean_logit,
      "logprob_weights, entropy_weights, lse_weights, mean_logit_weights: a loss needs "
      "one of them");
  CheckWeight(weights.logprob, "logprob_weights", inputs);
  CheckWeight(weights.entropy, "entropy_weights", inputs);
  CheckWeight(weights.lse, "lse_weights", inputs);
  CheckWeight(weights.mean_logit, "mean_logit_weights", inputs);
}

LinearLogprobLoss ForwardWithGradients(const UpstreamGradients& weights,
                                       const LinearLogprobInputs& inputs,
                                       const LinearLogprobOptions& options, GradientNeeds needs,
                                       int64_t cache_bytes) {
  // Dtypes are those written here, whatever autocast would make of them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const RankGroup group(options.group);
  const at::Device device = inputs.hidden.device();
  group.Together(device, [&] {
    CheckArguments(inputs, options, group);
    CheckWeights(weights, inputs);
    FormatOfLogitCache(inputs, options);
    IsForwardFused(inputs, options);
  });
  std::vector<int64_t> common = CommonArguments(inputs, options);
  for (const bool flag : {needs.hidden, weights.logprob.has_value(), weights.entropy.has_value(),
                          weights.lse.has_value(), weights.mean_logit.has_value()}) {
    common.push_back(flag);
  }
  group.CheckSame(device, common);
  const Shard shard(inputs, options, group);
  const at::Tensor hidden = HiddenOfAllRows(inputs, options, group);
  Rows rows;
  group.Together(device, [&] { rows = CountedRows(hidden, inputs, options, shard, group); });

  const LinearLogprobOptions computed = OptionsOf(weights, needs, options);
  const UpstreamGradients row_weights = OfRows(weights, rows, options);
  Pass pass(inputs, computed, needs, shard, group);
  LinearLogprobOutputs scores =
      pass.Run(rows, row_weights, BlockSize(rows.size(), inputs, computed, cache_bytes, group));
  LinearLogprobLoss result;
  result.loss = LossOf(scores, row_weights).to(WideType(inputs));
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
