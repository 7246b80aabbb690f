// Scores: checks, the rows that count, their scores (row_scores.h), and back to the place of all
// rows.

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logit_cache.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/row_scores.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {

LinearLogprobOutputs Forward(const LinearLogprobInputs& inputs,
                             const LinearLogprobOptions& options) {
  // Dtypes are those written here, whatever autocast would make of them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const RankGroup group(options.group);
  const at::Device device = inputs.hidden.device();
  RowSelection selection;
  at::Tensor cache;
  const RankGroup::Extents extents = group.Agree(device, [&] {
    CheckArguments(inputs, options, group);
    FormatOfLogitCache(inputs, options);
    IsForwardFused(inputs, options);
    selection = SelectCountedRows(inputs, options, group, /*upstream=*/{});
    cache = RoomForLogits(inputs, options);
    return RankGroup::Claim{CommonArguments(inputs, options, selection),
                            {EndOfShard(inputs, options)}};
  });
  const Shard shard(inputs, options, extents.front());
  const at::Tensor hidden = HiddenOfAllRows(inputs, options, group);
  const Rows rows = RowsOf(selection, hidden, inputs);
  LinearLogprobOutputs scores = ScoreRows(rows, inputs, options, shard, group, cache);
  scores.cache = cache;
  return InPlaceOfAll(scores, rows, inputs, options);
}

}  // namespace logprobd::torch_ops
