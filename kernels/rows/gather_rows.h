#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace logprobd::kernels {

/// Inputs and outputs of LaunchGatherRows. Pointers are device memory and stay the caller's; rows
/// and what lies between them are whole multiples of 16 bytes.
struct GatherRowsParams {
  int64_t num_rows = 0;             ///< 0 to 2^31 - 1; 0 does nothing.
  const int64_t* places = nullptr;  ///< [num_rows], of rows in `source`.
  const void* source = nullptr;     ///< 16-byte aligned.
  int64_t source_stride_bytes = 0;  ///< From row to row.
  int64_t row_bytes = 0;
  void* rows = nullptr;  ///< [num_rows, row_bytes], 16-byte aligned.
};

/// Enqueues copies of some rows, one behind the other, on `stream` and returns without waiting.
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchGatherRows(const GatherRowsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
