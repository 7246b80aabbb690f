// Gradients: the rows that are reached, a block of columns at a time (gradient_sums.h), then the
// sum over the ranks.

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "kernels/torch_ops/backward_rows.h"
#include "kernels/torch_ops/gradient_sums.h"
#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {
namespace {

void CheckWeightGrad(const std::optional<at::Tensor>& weight_grad, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(!weight_grad.has_value() || (weight_grad->sizes() == weight.sizes() &&
                                                 weight_grad->scalar_type() == at::kFloat),
                    "weight_grad must be float32 and have the shape of weight, ", weight.sizes());
}

}  // namespace

InputGradients Backward(const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
                        const SavedOutputs& saved, const LinearLogprobOptions& options,
                        GradientNeeds needs, const std::optional<at::Tensor>& weight_grad) {
  // Dtypes are those written here, whatever autocast would make of them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const RankGroup group(options.group);
  const at::Device device = inputs.hidden.device();
  // Only the mean of all logits asks for more of the whole vocabulary than this rank's part.
  int64_t end = std::max(EndOfShard(inputs, options), options.vocab_valid);
  if (upstream.mean_logit.has_value()) {
    end = group.Agree(device, [&] { return RankGroup::Claim{{}, {end}}; }).front();
  }
  const at::Tensor hidden = HiddenOfAllRows(inputs, options, group);

  GradientSums sums;
  BackwardRows all;
  group.Agree(device, [&] {
    const Shard shard(inputs, options, end);
    CheckDevices(inputs, weight_grad);
    CheckWeightGrad(weight_grad, inputs.weight);
    const RowSelection reached =
        SelectRows(FlatTarget(inputs), options.ignore_index, upstream, /*owned=*/{});
    all = RowsReached(reached, hidden, upstream, inputs, saved, options);
    const int64_t num_rows = all.rows.size();
    sums = RoomForGradients(inputs, shard, needs, weight_grad, num_rows, AreAddedAtOnce(num_rows));
    AddGradients(all, inputs, options, shard, sums);
    return RankGroup::Claim{{needs.hidden}, {}};
  });
  if (weight_grad.has_value()) sums.weight.reset();  // it is where it should be
  return OverRanks(sums, all.rows, inputs, options, group);
}

}  // namespace logprobd::torch_ops
