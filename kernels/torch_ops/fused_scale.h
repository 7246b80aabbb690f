#pragma once

#include <ATen/core/Tensor.h>

namespace logprobd::torch_ops {

/// Multiplies `gradient` in place by `factor`, one fp32 number, on a GPU; looks there, and leaves
/// memory alone for 1. False, and nothing done, for other tensors.
bool ScaleOnGpu(const at::Tensor& gradient, const at::Tensor& factor);

}  // namespace logprobd::torch_ops
