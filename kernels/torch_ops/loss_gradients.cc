// A block of rows at a time: scores, with logits kept -> gradients from these.

#include "kernels/torch_ops/loss_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
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

/// Whether a row's gradients are its exponentials times one factor, but for the target's.
bool AreGradientsExponentials(const LossWeights& weights, GradientNeeds needs,
                              const LinearLogprobInputs& inputs,
                              const LinearLogprobOptions& options) {
  const auto [logprob, entropy, lse, mean_logit] = weights.factors;
  const bool is_logprob_alone = logprob != 0 && entropy == 0 && lse == 0 && mean_logit == 0;
  // The bias's gradient adds up columns whose rows have their factors yet to get.
  return is_logprob_alone && !needs.bias && options.softcap == 0 &&
         inputs.hidden.scalar_type() == at::kBFloat16;  // fp16 has not the exponentials' range
}

/// What is computed for the loss, whatever is returned.
LinearLogprobOptions OptionsOf(const LossWeights& weights, GradientNeeds needs,
                               const LinearLogprobInputs& inputs, LinearLogprobOptions options) {
  options.need_entropy |= weights.factors[1] != 0;
  options.need_mean_logit |= weights.factors[3] != 0;
  if (!needs.hidden && !needs.weight && !needs.bias) options.keep_logits = KeptLogits::kNone;
  if (options.keep_logits == KeptLogits::kExponentials &&
      AreGradientsExponentials(weights, needs, inputs, options)) {
    options.keep_logits = KeptLogits::kRebasedExponentials;
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
/// `when_hidden_is_added`: as AddGradients, but not where some rows are left out.
void AddReached(const BackwardRows& reached, const LinearLogprobInputs& inputs,
                const LinearLogprobOptions& options, const Shard& shard, GradientSums& sums,
                const std::function<void()>& when_hidden_is_added) {
  const at::Tensor hidden = sums.hidden;
  if (!hidden.defined() || !reached.rows.index.defined()) {
    return AddGradients(reached, inputs, options, shard, sums, when_hidden_is_added);
  }
  sums.hidden = at::empty({reached.rows.size(), hidden.size(1)}, hidden.options());
  AddGradients(reached, inputs, options, shard, sums);
  at::Tensor(hidden).zero_().index_copy_(0, reached.rows.index, sums.hidden);
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
  /// `weighed`: the rows of which some weight is not 0. `cache`: room for the logits of a block.
  Pass(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options, GradientNeeds needs,
       const Agreement& agreed, const RankGroup& group, RowSelection weighed, at::Tensor cache)
      : inputs_(inputs),
        options_(options),
        needs_(needs),
        shard_(agreed.shard),
        group_(group),
        weighed_(std::move(weighed)),
        rows_(agreed.rows),
        block_rows_(BlockSize(rows_.size(), agreed.rows_at_a_time)),
        cache_(std::move(cache)) {}

  /// Scores of all rows. `begun`: those of the first block, or null. What a rank fails at behind
  /// its collectives, Gradients tells.
  LinearLogprobOutputs Run(const LossWeights& weights, std::unique_ptr<PendingScores> begun) {
    std::vector<LinearLogprobOutputs> blocks;
    int64_t begin = 0;
    do {
      const Rows row_indices = rows_.Part(begin, std::min(block_rows_, rows_.size() - begin));
      // Behind it a rank that fails would leave the others in the collectives of the scores.
      if (begin > 0) {
        group_.Together(inputs_.hidden.device(),
                        [&] { ReserveRoom({}, InputsOf(row_indices, inputs_), options_); });
      }
      const at::Tensor cache = RowsFrom(cache_, 0, row_indices.size());
      blocks.push_back(
          ScoreRows(row_indices, inputs_, options_, shard_, group_, cache, std::move(begun)));
      // Of rows of a search, all in this block, those that it has found.
      const Rows block = row_indices.Resolved();
      if (begin == 0) rows_ = rows_.Resolved();
      attempt_([&] {
        // Behind the block's kernels, which run meanwhile.
        if (begin == 0) row_weights_ = WeightsOfRows(weights, rows_, inputs_, options_);
        const auto block_weights = Changed(row_weights_, [&](const at::Tensor& all) {
          return RowsFrom(all, begin, block.size());
        });
        Differentiate(block, blocks.back(), block_weights, begin);
      });
      begin += block.size();
    } while (begin < rows_.size());
    cache_.reset();
    if (group_.is_alone()) attempt_.Rethrow(false);
    return JoinScores(blocks);
  }

  /// A rank that has failed makes every one throw.
  InputGradients Gradients() {
    if (needs_.hidden && !hidden_sum_.has_value()) StartSum();
    if (group_.is_alone()) return GradientsOf(hidden_sum_, sums_, inputs_);
    // The host waits for the others' word that they have not failed behind everything else.
    const at::Tensor has_failed = group_.Tell(inputs_.hidden.device(), attempt_);
    InputGradients gradients = GradientsOf(hidden_sum_, sums_, inputs_);
    attempt_.Rethrow(has_failed.item<int>() != 0);
    return gradients;
  }

  /// That were found.
  const Rows& rows() const { return rows_; }
  /// [n] each, of these rows.
  const UpstreamGradients& row_weights() const { return row_weights_; }

 private:
  void Differentiate(const Rows& block, const LinearLogprobOutputs& scores,
                     const UpstreamGradients& weights, int64_t begin) {
    if (!needs_.hidden && !needs_.weight && !needs_.bias) return;
    const LinearLogprobInputs block_inputs = InputsOf(block, inputs_);
    const at::ScalarType wide = WideType(inputs_);
    SavedOutputs saved = {scores.lse.to(wide), scores.lse_rest.to(wide), scores.entropy, {}};
    if (saved.entropy.defined()) saved.entropy = saved.entropy.to(wide);
    if (options_.keep_logits != KeptLogits::kNone) {
      saved.cache = RowsFrom(cache_, 0, block.size());
      saved.is_cache_spent = true;
    }
    RowSelection selection = {.are_unchecked = block.are_unchecked};
    if (!weighed_.Resolved().has_all_counted) {
      selection = CompactRows(block.target(), options_.ignore_index, weights, /*owned=*/{});
    }
    const BackwardRows reached =
        RowsReached(selection, block.hidden, weights, block_inputs, saved, options_);
    if (begin == 0) {
      const bool is_all = block.size() == rows_.size() && AreAddedAtOnce(reached.rows.size());
      sums_ = RoomForGradients(inputs_, shard_, needs_, std::nullopt, rows_.size(), is_all);
    }
    GradientSums block_sums = sums_;
    if (needs_.hidden) {
      block_sums.hidden = RowsFrom(sums_.hidden, begin, block.size());
    }
    const bool is_last = begin + block.size() == rows_.size();
    AddReached(reached, block_inputs, options_, shard_, block_sums, [&] {
      // Else rows would be put in their places beside the kept logits: that is more memory.
      if (is_last && !group_.is_alone() && !rows_.index.defined()) StartSum();
    });
    sums_.weight_into = block_sums.weight_into;
  }

  void StartSum() {
    // The others sum, too, where this rank had no room for its gradients.
    const at::Tensor hidden =
        sums_.hidden.defined() ? sums_.hidden
                               : RoomForGradients(inputs_, shard_, {.hidden = true}, std::nullopt,
                                                  rows_.size(), /*is_added_at_once=*/false)
                                     .hidden;
    hidden_sum_ = StartHiddenSum(hidden, rows_, inputs_, options_, group_);
  }

  const LinearLogprobInputs& inputs_;
  const LinearLogprobOptions& options_;
  const GradientNeeds needs_;
  const Shard& shard_;
  const RankGroup& group_;
  const RowSelection weighed_;
  Rows rows_;
  const int64_t block_rows_;
  at::Tensor cache_;
  Attempt attempt_;
  UpstreamGradients row_weights_;
  GradientSums sums_;
  std::optional<RankGroup::PendingSum> hidden_sum_;
};

/// Whether the rows may be scored while they are searched for: there is one block of them.
bool AreSearchedMeanwhile(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                          int64_t cache_bytes) {
  const int64_t num_rows = inputs.target.numel();
  return AreScoredWhileSearched(inputs, options) &&
         RowsThatFit(num_rows, inputs, options, cache_bytes) == num_rows;
}

}  // namespace

LinearLogprobLoss ForwardWithGradients(const LossWeights& weights,
                                       const LinearLogprobInputs& inputs,
                                       const LinearLogprobOptions& options, GradientNeeds needs,
                                       int64_t cache_bytes) {
  // Dtypes are those written here, whatever autocast would make of them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const RankGroup group(options.group);
  const LinearLogprobOptions computed = OptionsOf(weights, needs, inputs, options);
  RowSelection weighed;
  at::Tensor cache;
  const auto prepare = [&] {
    CheckWeights(weights, inputs);
    Preparation mine;
    const Search search =
        AreSearchedMeanwhile(inputs, computed, cache_bytes) ? Search::kUnderWay : Search::kAwaited;
    const UpstreamGradients deciding = DecidingWeights(weights);
    weighed = SelectCountedRows(inputs, options, group, deciding, search);
    // Mostly all rows that count have a weight: where that is known, they are not looked for again.
    const bool is_known = weighed.search == nullptr || !HasAny(deciding);
    mine.selection = is_known && weighed.has_all_counted
                         ? weighed
                         : SelectCountedRows(inputs, options, group, /*upstream=*/{}, search);
    mine.common = {needs.hidden, weights.is_mean};
    for (const double factor : weights.factors) {
      mine.common.push_back(std::bit_cast<int64_t>(factor));
    }
    const int64_t num_rows = mine.selection.size(inputs.target.numel());
    mine.rows_at_a_time = RowsThatFit(num_rows, inputs, computed, cache_bytes);
    const int64_t block_rows = BlockSize(num_rows, mine.rows_at_a_time);
    cache = RoomForLogitsOf(block_rows, inputs, computed);
    if (!group.is_alone()) {
      ReserveRoom(mine.selection, inputs, computed);
      if (needs.hidden) ReserveHiddenSum(inputs);
    }
    return mine;
  };
  std::unique_ptr<PendingScores> begun;
  const Agreement agreed =
      AgreeOnRows(group, inputs, options, prepare, [&](const Rows& rows, const Shard& shard) {
        begun = BeginScores(rows.Part(0, cache.size(0)), inputs, computed, shard, cache);
      });
  // Another rank may have room for smaller blocks only.
  if (BlockSize(agreed.rows.size(), agreed.rows_at_a_time) != cache.size(0)) begun.reset();
  Pass pass(inputs, computed, needs, agreed, group, weighed, std::move(cache));
  LinearLogprobOutputs scores = pass.Run(weights, std::move(begun));
  LinearLogprobLoss result;
  result.loss = LossOf(scores, pass.row_weights()).to(WideType(inputs));
  if (!options.need_entropy) scores.entropy.reset();
  if (!options.need_mean_logit) scores.mean_logit.reset();
  result.scores = InPlaceOfAll(scores, pass.rows(), inputs, options);
  result.gradients = pass.Gradients();
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
