#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace logprobd::testing {

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

/// Enqueues the dot products of all rows and columns on the exact stored values: products and sums
/// in double, by the plainest kernel there is.
[[nodiscard]] cudaError_t LaunchLogitsReference(const LogitsReferenceParams& params,
                                                cudaStream_t stream);

}  // namespace logprobd::testing
