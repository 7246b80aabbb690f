#include "kernels/torch_ops/agreement.h"

#include <algorithm>
#include <optional>

#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/logit_cache.h"

namespace logprobd::torch_ops {

Agreement AgreeOnRows(const RankGroup& group, const LinearLogprobInputs& inputs,
                      const LinearLogprobOptions& options,
                      const std::function<Preparation()>& prepare,
                      const std::function<void(const Rows&, const Shard&)>& meanwhile) {
  Preparation mine;
  std::optional<Shard> own;
  auto claims = group.StartAgreement(inputs.hidden.device(), [&] {
    CheckArguments(inputs, options, group);
    FormatOfLogitCache(inputs, options);
    IsForwardFused(inputs, options);
    mine = prepare();
    RankGroup::Claim claim = {CommonArguments(inputs, options, mine.selection), {}};
    claim.common.insert(claim.common.end(), mine.common.begin(), mine.common.end());
    const IdRange ids = IdsOfShard(inputs, options);
    claim.own = {ids.begin, ids.end, mine.rows_at_a_time};
    own = ShardSoFar(inputs, options);
    return claim;
  });
  const auto find_rows = [&] {
    return RowsOf(mine.selection, HiddenOfAllRows(inputs, options, group), inputs);
  };
  Rows rows;
  if (!claims.has_failed() && !options.sequence_parallel) {
    rows = find_rows();
    if (meanwhile) meanwhile(rows, *own);
  }
  const auto of_ranks = claims.Result();
  int64_t end = 0;
  int64_t rows_at_a_time = mine.rows_at_a_time;
  std::vector<IdRange> parts;
  for (const auto& [part_begin, part_end, part_rows] : of_ranks) {
    const int64_t valid_end =
        options.vocab_valid > 0 ? std::min(part_end, options.vocab_valid) : part_end;
    parts.push_back({part_begin, valid_end});
    end = std::max(end, part_end);
    rows_at_a_time = std::min(rows_at_a_time, part_rows);
  }
  CheckParts(parts);
  const Shard shard(inputs, options, end);
  if (options.sequence_parallel) rows = find_rows();
  rows.are_owned =
      !group.is_alone() && !mine.selection.are_unchecked && AreOwned(mine.selection.targets, parts);
  return {shard, rows, rows_at_a_time};
}

}  // namespace logprobd::torch_ops
