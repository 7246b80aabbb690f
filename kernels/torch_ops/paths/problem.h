#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/torch_ops/ranks/rank_group.h"
#include "kernels/torch_ops/rows/pass.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {

class ScoringPath;

/// One pass of the operator, with its group of ranks and its path. Functions that take a Problem
/// read these decisions from it.
struct Problem : Pass {
  /// Resolves the process group. Throws c10::ValueError for an unknown group.
  Problem(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

  /// Sets `path` and `shard`. Replaces `inputs` by copies where the path cannot read them in place,
  /// and makes hidden [n, H]. Throws c10::ValueError for a cache or a vocabulary that is not
  /// supported. The ranks of a group call it at a point where errors are still shared with the
  /// other ranks.
  void Plan();

  /// Returns the problem of scoring or differentiating only `rows`, all of which count as valid.
  Problem ForRows(const Rows& rows) const;

  /// Returns the hidden states of all rows, [num_rows, H]. With sequence parallelism the ranks of
  /// the group gather them, so they must call it together, once; it allocates nothing.
  at::Tensor HiddenOfAllRows();

  /// Returns whether the gradient of hidden is summed over several ranks.
  bool sums_hidden_gradient() const {
    return !is_alone && !options.parallel.partial_hidden_gradient;
  }

  RankGroup group;
  const ScoringPath* path = nullptr;
  /// [num_rows, H], memory for the hidden states of all ranks. Defined from Plan to
  /// HiddenOfAllRows, with sequence parallelism.
  at::Tensor gathered_hidden;
};

}  // namespace logprobd::torch_ops
