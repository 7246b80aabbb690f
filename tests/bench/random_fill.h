#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace logprobd::testing {

/// Fills device memory with `count` normal bf16 values of the given standard deviation; the same
/// for a seed.
cudaError_t FillNormal(void* out, int64_t count, float stddev, uint64_t seed);

/// Enqueues a kernel that reads `bytes` (a multiple of 64) of device memory and keeps nothing.
cudaError_t LaunchReadAll(const void* in, int64_t bytes, cudaStream_t stream);

/// Enqueues a kernel that writes the SM clock in MHz, as it runs, to `*out` in device memory.
cudaError_t LaunchReadClock(float* out, cudaStream_t stream);

}  // namespace logprobd::testing
