// Scores: checks, the rows that count, their scores (row_scores.h), and back to the place of all
// rows.

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <utility>

#include "kernels/torch_ops/agreement.h"
#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logit_cache.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/row_scores.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {

LinearLogprobOutputs Forward(const LinearLogprobInputs& inputs,
                             const LinearLogprobOptions& options) {
  // Dtypes are those written here, whatever autocast would make of them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const RankGroup group(options.group);
  at::Tensor cache;
  const auto prepare = [&] {
    Preparation mine;
    mine.selection = SelectCountedRows(
        inputs, options, group, /*upstream=*/{},
        AreScoredWhileSearched(inputs, options) ? Search::kUnderWay : Search::kAwaited);
    cache = RoomForLogits(inputs, options);
    if (!group.is_alone()) ReserveRoom(mine.selection, inputs, options);
    return mine;
  };
  std::unique_ptr<PendingScores> begun;
  const Agreement agreed =
      AgreeOnRows(group, inputs, options, prepare, [&](const Rows& rows, const Shard& shard) {
        begun = BeginScores(rows, inputs, options, shard, cache);
      });
  LinearLogprobOutputs scores =
      ScoreRows(agreed.rows, inputs, options, agreed.shard, group, cache, std::move(begun));
  scores.cache = cache;
  return InPlaceOfAll(scores, agreed.rows.Resolved(), inputs, options);
}

}  // namespace logprobd::torch_ops
