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

/// Fills device memory with `count` random values, which depend on the seed only.
cudaError_t FillNormal(void* out, int64_t count, const NormalFill& fill);

/// Enqueues a kernel that only reads `bytes` (a multiple of 64) of device memory.
cudaError_t LaunchReadAll(const void* in, int64_t bytes, cudaStream_t stream);

/// Enqueues a kernel that writes the current SM clock in MHz to `*out` in device memory.
cudaError_t LaunchReadClock(float* out, cudaStream_t stream);

/// Inputs and output of LaunchLogitsReference, in device memory.
struct LogitsReferenceParams {
  kernels::Dtype hidden_dtype = kernels::Dtype::kBf16;
  const void* hidden = nullptr;  ///< [num_rows, hidden_size]
  const void* weight = nullptr;  ///< [vocab_size, hidden_size] in bf16.
  int64_t num_rows = 0;
  int64_t vocab_size = 0;  ///< Below 2^20.
  int64_t hidden_size = 0;
  double* logits = nullptr;  ///< [num_rows, vocab_size], written.
};

/// Enqueues the dot products of all rows and columns on the exact stored values, with products and
/// sums in double. kernels/reference can do the same on the CPU, but would take hours for these
/// sizes, so it only computes the scores from these logits.
[[nodiscard]] cudaError_t LaunchLogitsReference(const LogitsReferenceParams& params,
                                                cudaStream_t stream);

}  // namespace logprobd::testing
