#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchCopyRows. Pointers are device memory and stay the caller's; rows and
/// what lies between them are whole multiples of 16 bytes.
struct CopyRowsParams {
  int64_t num_rows = 0;                  ///< 0 to 2^31 - 1; 0 does nothing.
  const int64_t* row_indices = nullptr;  ///< [num_rows], of rows in `source`; null: 0, 1, ...
  const void* source = nullptr;          ///< 16-byte aligned.
  int64_t source_stride_bytes = 0;       ///< From row to row.
  int64_t row_bytes = 0;
  /// [num_rows], by which each is multiplied; products are formed in fp32 and rounded to the
  /// element. Null: bits are copied, of whatever dtype.
  const float* factors = nullptr;
  Dtype dtype = Dtype::kBf16;  ///< Of what is multiplied.
  /// [num_rows, row_bytes], 16-byte aligned; may be `source` where its rows lie together and no
  /// places are given.
  void* rows = nullptr;
};

/// Enqueues copies of some rows, one behind the other, on `stream` and returns without waiting.
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchCopyRows(const CopyRowsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
