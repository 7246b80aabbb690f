#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

class DeviceOps;

/// The choices that are made once for a pass of the operator, as far as functions of rows read
/// them.
struct Pass {
  /// Returns the number of all rows, that is of targets, whatever their values.
  int64_t num_rows() const { return inputs.target.numel(); }
  int64_t hidden_size() const { return inputs.weight.size(1); }
  at::Device device() const { return inputs.hidden.device(); }

  LinearLogprobInputs inputs;
  LinearLogprobOptions options;
  at::ScalarType wide;  ///< Dtype of sums and gradients (WideDtype).
  const DeviceOps* device_ops;
  bool is_alone = true;  ///< False if other ranks hold parts of the vocabulary.
  /// This rank's part of the vocabulary. In a group, shard.vocab_size is only the size that this
  /// rank knows until the ranks have agreed on it.
  Shard shard = {};
};

}  // namespace logprobd::torch_ops
