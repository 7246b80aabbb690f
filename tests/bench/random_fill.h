#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace logprobd::testing {

/// A normal distribution, rounded to `dtype`.
struct NormalFill {
  kernels::Dtype dtype = kernels::Dtype::kBf16;  ///< kBf16 or kF32.
  float mean = 0.0F;
  float stddev = 1.0F;
  uint64_t seed = 1;
};

/// Fills device memory with `count` random values; the same for a seed.
cudaError_t FillNormal(void* out, int64_t count, const NormalFill& fill);

/// Enqueues a kernel that reads `bytes` (a multiple of 64) of device memory and keeps nothing.
cudaError_t LaunchReadAll(const void* in, int64_t bytes, cudaStream_t stream);

/// Enqueues a kernel that writes the SM clock in MHz, as it runs, to `*out` in device memory.
cudaError_t LaunchReadClock(float* out, cudaStream_t stream);

}  // namespace logprobd::testing
