#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_gradient.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchRebaseExponentials. Pointers point to device memory, which the
/// caller owns. CachedExponentials (kernels/fused/params.h) defines the exponentials
/// and the exponents.
struct RebaseExponentialsParams {
  int64_t num_rows = 0;                   ///< 0 to 2^31 - 1; 0 does nothing.
  __nv_bfloat16* exponentials = nullptr;  ///< [num_rows, row_tiles, 192], 16-byte aligned; in, out.
  const int32_t* exponents = nullptr;     ///< [num_rows, row_tiles], of the exponentials passed in.
  int64_t row_tiles = 0;                  ///< >= num_tiles.
  int64_t exponent_stride = 0;            ///< int32s from one row to the next; 0: row_tiles.
  int64_t num_tiles = 0;                  ///< Tiles of the whole shard, >= 1.
  /// [num_rows], with the cached values of the target. `weighted` and `mean` must be 0, and the
  /// head must have no cap.
  const RowGradient* rows = nullptr;
  float* factors = nullptr;  ///< [num_rows], written: factor of each row.
};

/// Enqueues on `stream` the conversion of cached exponentials into gradients of the dot products,
/// up to one factor per row, and returns without waiting: the gradient of a row is factors[row]
/// times its converted exponentials. The exponentials of a row are rebased to one exponent, and the
/// target's element becomes its gradient divided by the factor, which is chosen so that their
/// product is exact in fp32. Rows that were cached with a reference exponent need almost no work.
/// Requires a loss whose gradient is linear in the probabilities.
///
/// Thread-safe. Returns cudaErrorInvalidValue when a parameter is out of range, otherwise the error
/// of the launch.
[[nodiscard]] cudaError_t LaunchRebaseExponentials(const RebaseExponentialsParams& params,
                                                   cudaStream_t stream);

}  // namespace logprobd::kernels
