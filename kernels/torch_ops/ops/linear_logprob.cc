// Implements the forward and the backward pass: the valid rows are compacted, the ranks
// agree on the rows, the path computes their scores or gradients, and the results are scattered to
// all rows.

#include "kernels/torch_ops/ops/linear_logprob.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "kernels/torch_ops/ops/agreement.h"
#include "kernels/torch_ops/paths/gradient_sums.h"
#include "kernels/torch_ops/paths/listed_gradients.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/paths/scoring_path.h"
#include "kernels/torch_ops/ranks/rank_group.h"
#include "kernels/torch_ops/rows/listed_pairs.h"
#include "kernels/torch_ops/rows/valid_rows.h"
#include "kernels/torch_ops/types/argument_checks.h"

namespace logprobd::torch_ops {
namespace {

/// Returns an uninitialised cache. If memory is short and the options allow it, the pass caches
/// nothing, and the result has no rows.
at::Tensor AllocateCache(Problem& problem) {
  try {
    return EmptyLogitCache(problem.inputs, problem.options);
  } catch (const c10::OutOfMemoryError&) {
    if (problem.options.memory.cached_rows < 0) throw;
    at::Tensor none = EmptyLogitCache(0, problem);
    problem.options.memory.keep_logits = LogitCacheKind::kNone;
    return none;
  }
}

/// Returns whether the gradients need data of the other ranks: their hidden states, or the size of
/// the vocabulary, by which the gradient of an unweighted mean logit is divided.
bool NeedsOtherRanks(const UpstreamGradients& upstream, const Problem& problem) {
  return problem.options.parallel.sequence_parallel ||
         (upstream.mean_logit.has_value() && !problem.inputs.mean_logit_weights.has_value());
}

}  // namespace

LinearLogprobOutputs Forward(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                             const MaybeTensor& weight_grad) {
  // Autocast must not change the dtypes that are chosen here.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Problem problem(inputs, WithRebasedCache(inputs, options));
  at::Tensor cache;
  std::function<CandidateNumbers()> candidates;
  const auto prepare = [&] {
    CheckArguments(inputs, options, problem.group.size());
    CheckDevices(inputs, weight_grad);
    CheckWeightGrad(weight_grad, inputs.weight);
    problem.Plan();
    Preparation mine;
    const bool is_early = problem.path->ScoresDuringCompaction(problem);
    mine.subset = CompactValidRows(problem, /*upstream=*/{}, is_early ? Wait::kLater : Wait::kNow);
    candidates = StartReadingCandidates(problem);
    if (!problem.group.is_alone()) {
      const CandidateNumbers numbers = candidates();
      mine.common = {{"values of candidate_ids", numbers.ids_checksum},
                     {"values of candidate_offsets", numbers.offsets_checksum}};
    }
    cache = AllocateCache(problem);
    mine.rows = PrepareRows(mine.subset, problem);
    if (!problem.group.is_alone()) ReserveForwardMemory(mine.rows.size(), problem);
    return mine;
  };
  std::unique_ptr<PendingScores> first;
  const Agreement agreed = AgreeOnRows(problem, prepare, [&](const Rows& rows) {
    first = problem.path->StartFirstBlock(rows, problem, cache);
  });
  CheckCandidateIds(candidates(), problem);
  LinearLogprobOutputs scores = problem.path->Score(agreed.rows, problem, cache, std::move(first));
  scores.cache = cache;
  return ScatterScores(scores, agreed.rows.Resolved(), problem);
}

InputGradients Backward(const MaybeTensor& weight_grad, const UpstreamGradients& upstream,
                        const SavedOutputs& saved, const LinearLogprobInputs& inputs,
                        const LinearLogprobOptions& options, GradientNeeds needs) {
  needs.bias = needs.bias && inputs.bias.has_value();
  // Autocast must not change the dtypes that are chosen here.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Problem problem(inputs, WithRebasedCache(inputs, options));
  if (!saved.cache.has_value() || saved.cache->size(0) == 0) {
    problem.options.memory.keep_logits = LogitCacheKind::kNone;
  }
  problem.options.need_target_rank = false;  // The rank has no gradient.
  const RankGroup& group = problem.group;
  const int64_t num_all = problem.num_rows();
  RowSubset subset;
  ListedGradients listed;
  GradientSums sums;
  RankGroup::Buffers error_buffers;
  RankGroup::PendingInfo pending = group.StartExchange(problem.device(), [&] {
    CheckDevices(inputs, weight_grad);
    CheckWeightGrad(weight_grad, inputs.weight);
    problem.Plan();
    listed = ListedGradients(upstream, saved, problem);
    // The gradients overwrite the cached exponentials, and lists their elements, only if the host
    // knows the rows.
    const bool is_in_place = saved.cache.has_value() && saved.is_cache_overwritable;
    const bool is_early = !is_in_place && !listed.has_any() &&
                          problem.path->DifferentiatesDuringCompaction(upstream, problem);
    subset = CompactRows(problem, FlatTarget(problem.inputs), listed.deciding(), /*ids=*/{},
                         is_early ? Wait::kLater : Wait::kNow);
    const int64_t num_rows = subset.size(num_all);
    sums = AllocateSums(problem, needs, weight_grad, num_rows, AreAddedAtOnce(num_rows));
    error_buffers = group.AllocateErrorBuffers(problem.device());
    if (needs.hidden && problem.sums_hidden_gradient()) ReserveHiddenSum(problem);
    const IdRange ids = ShardIds(inputs.weight, options.parallel);
    return RankGroup::RankInfo{.common = {{"need of hidden's gradient", needs.hidden}},
                               .own = {ids.begin, ids.end},
                               .has_shard = true};
  });
  // If the preparation failed on this rank, Result throws here, because the steps below cannot run.
  if (pending.has_error() || NeedsOtherRanks(upstream, problem)) {
    int64_t end = 0;
    for (const auto& own : pending.Result()) end = std::max(end, own[1]);
    problem.shard = Shard(inputs.weight, options.parallel, end);
  }
  const at::Tensor hidden = problem.HiddenOfAllRows();
  std::optional<RankGroup::PendingSum> hidden_sum;
  const auto start_hidden_sum = [&] {
    // A rank whose preparation failed does not take part in the sum, so all ranks throw here
    // at the latest.
    pending.Result();
    const RowSubset found = subset.Resolved();
    hidden_sum =
        StartHiddenSum(SliceRows(sums.hidden, 0, found.size(num_all)), found.row_indices, problem);
  };
  DeferredError error;
  error.Run([&] {
    const BackwardRows rows =
        MakeBackwardRows(subset, InPlainLayout(hidden), listed.upstream_of_rows(), saved, problem);
    listed.Prepare(subset, saved, problem);
    AddGradients(rows, problem, sums, listed, [&] {
      // The sum of scattered rows is started later: scattering needs memory, and the gradients of a
      // block of columns are still allocated here.
      const bool is_scattered = subset.Resolved().row_indices.defined();
      if (!problem.sums_hidden_gradient() || is_scattered) return false;
      start_hidden_sum();
      return true;
    });
  });
  pending.Result();
  // A rank that has failed takes part in the sum as well.
  if (needs.hidden && problem.sums_hidden_gradient() && !hidden_sum.has_value()) start_hidden_sum();
  InputGradients gradients;
  error.Run([&] {
    if (needs.hidden && !hidden_sum.has_value()) start_hidden_sum();
    if (weight_grad.has_value()) sums.weight.reset();  // The sum is already in weight_grad.
    gradients = ToInputGradients(hidden_sum, sums, inputs);
  });
  group.ShareError(error_buffers, error);
  return gradients;
}

}  // namespace logprobd::torch_ops
