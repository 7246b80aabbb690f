#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace logprobd::torch_ops {

// Views that are the tensor itself where there is nothing to leave out: each takes the host some
// microseconds, for which a GPU that rests waits before its first kernel.

/// All elements in one row.
inline at::Tensor Flat(const at::Tensor& values) {
  return values.dim() == 1 ? values : values.reshape({-1});
}

/// Rows [begin, begin + size).
inline at::Tensor RowsFrom(const at::Tensor& values, int64_t begin, int64_t size) {
  return begin == 0 && size == values.size(0) ? values : values.narrow(0, begin, size);
}

}  // namespace logprobd::torch_ops
