// Gradients: the rows that are reached, a block of columns at a time (gradient_sums.h), then the
// sum over the ranks.

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>

#include "kernels/torch_ops/backward_rows.h"
#include "kernels/torch_ops/fused_dot_gradients.h"
#include "kernels/torch_ops/gradient_sums.h"
#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"
#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

void CheckWeightGrad(const std::optional<at::Tensor>& weight_grad, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(!weight_grad.has_value() || (weight_grad->sizes() == weight.sizes() &&
                                                 weight_grad->scalar_type() == at::kFloat),
                    "weight_grad must be float32 and have the shape of weight, ", weight.sizes());
}

/// Whether something before the rows' gradients needs the other ranks: their hidden states, or the
/// size of the whole vocabulary, which the mean logit's gradient is divided by.
bool IsAgreedBefore(const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
                    const LinearLogprobOptions& options) {
  return options.sequence_parallel ||
         (upstream.mean_logit.has_value() && !inputs.mean_logit_weights.has_value());
}

}  // namespace

InputGradients Backward(const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
                        const SavedOutputs& saved, const LinearLogprobOptions& options,
                        GradientNeeds needs, const std::optional<at::Tensor>& weight_grad) {
  // Dtypes are those written here, whatever autocast would make of them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const RankGroup group(options.group);
  const at::Device device = inputs.hidden.device();
  const int64_t num_all = inputs.target.numel();
  RowSelection reached;
  GradientSums sums;
  std::optional<Shard> shard;
  RankGroup::PendingClaims claims = group.StartAgreement(device, [&] {
    CheckDevices(inputs, weight_grad);
    CheckWeightGrad(weight_grad, inputs.weight);
    shard = ShardSoFar(inputs, options);
    const Search search = AreDifferentiatedWhileSearched(upstream, inputs, options, *shard)
                              ? Search::kUnderWay
                              : Search::kAwaited;
    reached = CompactRows(FlatTarget(inputs), options.ignore_index, upstream, /*owned=*/{}, search);
    const int64_t num_rows = reached.size(num_all);
    sums = RoomForGradients(inputs, *shard, needs, weight_grad, num_rows, AreAddedAtOnce(num_rows));
    if (!group.is_alone() && needs.hidden) ReserveHiddenSum(inputs);
    return RankGroup::Claim{{needs.hidden}, {IdsOfShard(inputs, options).end}};
  });
  // Of a rank that has failed the result throws: nothing was prepared for what follows.
  if (claims.has_failed() || IsAgreedBefore(upstream, inputs, options)) {
    int64_t end = 0;
    for (const auto& of_rank : claims.Result()) end = std::max(end, of_rank.front());
    shard = Shard(inputs, options, end);
  }
  const at::Tensor hidden = HiddenOfAllRows(inputs, options, group);
  std::optional<RankGroup::PendingSum> hidden_sum;
  const auto start_hidden_sum = [&] {
    // A rank that has failed to prepare takes no part in the sum: here at the latest all throw.
    claims.Result();
    const RowSelection found = reached.Resolved();
    Rows row_indices;
    row_indices.index = found.index;
    row_indices.num_all = num_all;
    hidden_sum = StartHiddenSum(RowsFrom(sums.hidden, 0, found.size(num_all)), row_indices, inputs,
                                options, group);
  };
  Attempt attempt;
  attempt([&] {
    const BackwardRows rows = RowsReached(reached, hidden, upstream, inputs, saved, options);
    AddGradients(rows, inputs, options, *shard, sums, [&] {
      // Else rows would be put in their places beside a block of columns: that is more memory.
      const bool is_spread = reached.Resolved().index.defined();
      if (!group.is_alone() && !is_spread) start_hidden_sum();
    });
  });
  claims.Result();
  if (group.is_alone()) attempt.Rethrow(false);
  if (needs.hidden && !hidden_sum.has_value()) start_hidden_sum();
  // The host waits for the others' word that they have not failed behind everything else.
  const at::Tensor has_failed = group.is_alone() ? at::Tensor() : group.Tell(device, attempt);
  if (weight_grad.has_value()) sums.weight.reset();  // it is where it should be
  InputGradients gradients = GradientsOf(hidden_sum, sums, inputs);
  if (!group.is_alone()) attempt.Rethrow(has_failed.item<int>() != 0);
  return gradients;
}

}  // namespace logprobd::torch_ops
