#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchCopyRows. Pointers refer to device memory that the caller owns. Row
/// and stride sizes are multiples of 16 bytes.
struct CopyRowsParams {
  int64_t num_rows = 0;                  ///< Rows to copy, 0 to 2^31 - 1; 0 does nothing.
  const int64_t* row_indices = nullptr;  ///< [num_rows], rows of `source`; null: 0, 1, 2, ...
  const void* source = nullptr;          ///< 16-byte aligned.
  int64_t source_stride_bytes = 0;       ///< Distance between rows of `source`.
  int64_t row_bytes = 0;                 ///< Bytes that are copied per row.
  /// [num_rows]: factor of each row. Products are computed in fp32 and rounded to `dtype`. Null:
  /// bits are copied unchanged, whatever the dtype.
  const float* factors = nullptr;
  Dtype dtype = Dtype::kBf16;  ///< Element type; used with `factors` only.
  /// [num_rows, row_bytes], 16-byte aligned. May be `source` itself when the rows of `source` are
  /// contiguous and row_indices is null.
  void* rows = nullptr;
};

/// Enqueues on `stream` a copy of some rows into contiguous memory and returns without waiting.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the result
/// of the launch.
[[nodiscard]] cudaError_t LaunchCopyRows(const CopyRowsParams& params, cudaStream_t stream);

/// Enqueues on `stream` the multiplication of `count` elements at `values` (16-byte aligned) by the
/// single number `factor`, both in device memory, and returns without waiting. When the factor is 1
/// the kernel returns at once and does not touch `values`. Products are computed in fp32 and
/// rounded to `dtype`.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the result
/// of the launch.
[[nodiscard]] cudaError_t LaunchScaleUnlessOne(void* values, Dtype dtype, int64_t count,
                                               const float* factor, cudaStream_t stream);

}  // namespace logprobd::kernels
