#pragma once

#include <ATen/core/Tensor.h>

namespace logprobd::torch_ops {

/// Multiplies `gradient` in place by `factor`, one fp32 number, on a GPU; looks there, and leaves
/// memory alone for 1. False, and nothing done, for other tensors.
bool ScaleOnGpu(const at::Tensor& gradient, const at::Tensor& factor);

/// Writes each of `rows` [n, H] times its factor, fp32 [n, 1], to `products`, [n, H] of the same
/// dtype, which may be `rows`, on a GPU. False, and nothing done, for other tensors.
bool MultiplyRowsOnGpu(const at::Tensor& rows, const at::Tensor& factors,
                       const at::Tensor& products);

}  // namespace logprobd::torch_ops
