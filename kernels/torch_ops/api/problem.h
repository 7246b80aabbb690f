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

/// One pass of the operator, and everything that is decided about it once: group, wide dtype,
/// device operations, path and shard. Functions that take a Problem read the decisions from it.
struct Problem {
  /// Resolves the process group. Throws c10::ValueError for an unknown group.
  Problem(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

  /// Sets `path` and `shard`. Throws c10::ValueError for a cache or a vocabulary that is not
  /// supported; ranks of a group call it where an error still reaches the others.
  void Plan();

  /// The problem of scoring or differentiating some of the rows, all of which count as valid.
  Problem ForRows(const Rows& rows) const;

  /// Number of all rows: the targets, whatever they hold.
  int64_t num_rows() const { return inputs.target.numel(); }
  int64_t hidden_size() const { return inputs.weight.size(1); }
  at::Device device() const { return inputs.hidden.device(); }

  LinearLogprobInputs inputs;
  LinearLogprobOptions options;
  RankGroup group;
  at::ScalarType wide;  ///< Dtype of sums and gradients (WideDtype).
  const DeviceOps* device_ops;
  const ScoringPath* path = nullptr;
  /// This rank's part of the vocabulary. In a group, shard.vocab_size is the size as far as this
  /// rank knows it, until the ranks have agreed on it.
  Shard shard;
};

/// Throws c10::ValueError, naming the argument, when shapes, dtypes or options do not fit.
void CheckArguments(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                    const RankGroup& group);

}  // namespace logprobd::torch_ops
