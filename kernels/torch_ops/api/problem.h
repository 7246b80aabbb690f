#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/ranks/rank_group.h"
#include "kernels/torch_ops/rows/shard.h"

namespace logprobd::torch_ops {

class DeviceOps;
class ScoringPath;
struct Rows;

/// One pass of the operator, with the decisions that are made once per pass: group, wide dtype,
/// device operations, path and shard. Functions that take a Problem read the decisions from it.
struct Problem {
  /// Resolves the process group. Throws c10::ValueError for an unknown group, and while a CUDA
  /// graph is captured for a group of several ranks.
  Problem(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

  /// Sets `path` and `shard`. Replaces `inputs` by copies where the path cannot read them in place,
  /// and makes hidden [n, H]. Throws c10::ValueError for a cache or a vocabulary that is not
  /// supported. The ranks of a group call it at a point where errors are still shared with the
  /// other ranks.
  void Plan();

  /// Returns the problem of scoring or differentiating only `rows`, all of which count as valid.
  Problem ForRows(const Rows& rows) const;

  /// Returns the number of all rows, that is of targets, whatever their values.
  int64_t num_rows() const { return inputs.target.numel(); }
  int64_t hidden_size() const { return inputs.weight.size(1); }
  at::Device device() const { return inputs.hidden.device(); }
  /// Returns whether the gradient of hidden is summed over several ranks.
  bool sums_hidden_gradient() const {
    return !group.is_alone() && !options.partial_hidden_gradient;
  }

  LinearLogprobInputs inputs;
  LinearLogprobOptions options;
  RankGroup group;
  at::ScalarType wide;  ///< Dtype of sums and gradients (WideDtype).
  const DeviceOps* device_ops;
  const ScoringPath* path = nullptr;
  /// This rank's part of the vocabulary. In a group, shard.vocab_size is only the size that this
  /// rank knows until the ranks have agreed on it.
  Shard shard;
  /// [num_rows, H], memory for the hidden states of all ranks. Defined from Plan to
  /// HiddenOfAllRows, with sequence parallelism.
  at::Tensor gathered_hidden;
};

/// Throws a c10::ValueError that names the argument if shapes, dtypes or options are invalid or
/// inconsistent.
void CheckArguments(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                    const RankGroup& group);

}  // namespace logprobd::torch_ops
