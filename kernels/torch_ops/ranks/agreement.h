#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/torch_ops/api/problem.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {

/// The result of one rank's preparation for a pass.
struct Preparation {
  RowSubset subset;  ///< Valid rows. No compaction is pending in a group.
  /// Numbers that must be equal on all ranks, in addition to the arguments.
  std::vector<int64_t> common;
  int64_t block_rows_max = 0;  ///< Number of rows that fit this rank's memory at a time.
};

/// The values on which the ranks agree before a pass.
struct Agreement {
  Rows rows;               ///< Valid rows; with sequence parallelism also those of other ranks.
  int64_t block_rows_max;  ///< Number of rows that fit the memory of every rank at a time.
};

/// Prepares a pass on every rank of the group and lets the ranks agree, with one collective:
/// 1. calls `prepare`, which checks arguments, plans the problem and allocates. After this step no
///    rank reports a failure to the others, so large buffers should be allocated here;
/// 2. exchanges arguments and sizes, and meanwhile calls `while_waiting` (if any, and unless hidden
///    states are split over the ranks) with rows whose RowSubset is final;
/// 3. sets the size of the vocabulary in problem.shard, and the path that all shards permit.
/// Throws on every rank if `prepare` throws on any rank, if the ranks were called with different
/// arguments, or if their shards overlap.
Agreement AgreeOnRows(Problem& problem, const std::function<Preparation()>& prepare,
                      const std::function<void(const Rows&)>& while_waiting = {});

}  // namespace logprobd::torch_ops
