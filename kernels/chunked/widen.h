#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace logprobd::kernels {

/// Enqueues on `stream` the exact conversion of `count` elements of `dtype` (kBf16 or kF16) at `in`
/// to fp32 at `out`, and returns without waiting. Both are device memory aligned to 16 bytes,
/// `count` is a multiple of 8. Thread-safe.
///
/// Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchWiden(const void* in, Dtype dtype, int64_t count, float* out,
                                      cudaStream_t stream);

}  // namespace logprobd::kernels
