#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/ranks/rank_group.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {

/// The result of one rank's preparation for a pass.
struct Preparation {
  RowSubset subset;  ///< Valid rows. No compaction is pending in a group.
  Rows rows;         ///< The rows of `subset`, from PrepareRows.
  /// Numbers that must be equal on all ranks, in addition to the arguments.
  std::vector<RankGroup::CommonNumber> common;
  int64_t block_rows_max = 0;  ///< Number of rows that fit this rank's memory at a time.
};

/// The values on which the ranks agree before a pass.
struct Agreement {
  Rows rows;               ///< Valid rows; with sequence parallelism also those of other ranks.
  int64_t block_rows_max;  ///< Number of rows that fit the memory of every rank at a time.
};

/// Returns the rows of `subset`. With sequence parallelism, their hidden states are memory that
/// AgreeOnRows fills.
Rows PrepareRows(const RowSubset& subset, const Problem& problem);

/// Prepares a pass on every rank of the group and lets the ranks agree, with one collective:
/// 1. calls `prepare`, which checks arguments, plans the problem and allocates. A rank that fails
///    afterwards, before the ranks share errors again, makes the others wait forever. So memory is
///    allocated here, or reserved (ReserveForwardMemory), unless its failure is shared later;
/// 2. exchanges arguments and sizes, and meanwhile calls `while_waiting` (if any, and unless hidden
///    states are split over the ranks) with rows whose RowSubset is final;
/// 3. sets the size of the vocabulary in problem.shard, and the path that all shards permit.
/// Throws on every rank if `prepare` throws on any rank, if the ranks were called with different
/// arguments, or if their shards overlap.
Agreement AgreeOnRows(Problem& problem, const std::function<Preparation()>& prepare,
                      const std::function<void(const Rows&)>& while_waiting = {});

}  // namespace logprobd::torch_ops
