#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/row_selection.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {

/// What a rank brings to a pass over the rows of all.
struct Preparation {
  RowSelection selection;       ///< The rows that count; of a group, no search is under way.
  std::vector<int64_t> common;  ///< Beside CommonArguments, what must be the same on every rank.
  int64_t rows_at_a_time = 0;   ///< How many it can take.
};

/// What ranks know before a pass.
struct Agreement {
  Shard shard;
  Rows rows;               ///< Those that count; hidden states of other ranks' rows too.
  int64_t rows_at_a_time;  ///< That every rank can take.
};

/// Checks arguments and does `prepare` on every rank, by one collective: where either throws on
/// any, or ranks were called with different arguments, throws on every one, as where parts of the
/// vocabulary overlap. Then gathers hidden states that are split over ranks. Behind the collective
/// no rank tells the others that it failed: large buffers should have been asked for in `prepare`.
///
/// `meanwhile`, if any, is done before the host waits for the others, with a shard whose vocab_size
/// is not known yet; not where hidden states are split over ranks.
Agreement AgreeOnRows(const RankGroup& group, const LinearLogprobInputs& inputs,
                      const LinearLogprobOptions& options,
                      const std::function<Preparation()>& prepare,
                      const std::function<void(const Rows&, const Shard&)>& meanwhile = {});

}  // namespace logprobd::torch_ops
