#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace logprobd::kernels {

/// Enqueues on `stream` the multiplication of `count` elements at `values`, 16-byte aligned, by
/// `factor`, one number in device memory, and returns without waiting. Memory is left alone where
/// the factor is 1: what costs next to nothing. Products are formed in fp32 and
/// rounded to the element. Thread-safe.
///
/// Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchScaleUnlessOne(void* values, Dtype dtype, int64_t count,
                                               const float* factor, cudaStream_t stream);

}  // namespace logprobd::kernels
