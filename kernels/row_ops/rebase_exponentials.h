#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_gradient.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchRebaseExponentials. Pointers are device memory and stay the
/// caller's.
struct RebaseExponentialsParams {
  int64_t num_rows = 0;                   ///< 0 to 2^31 - 1; 0 does nothing.
  __nv_bfloat16* exponentials = nullptr;  ///< [num_rows, row_tiles, 192], 16-byte aligned; changed.
  const int32_t* exponents = nullptr;     ///< [num_rows, row_tiles], of before.
  int64_t row_tiles = 0;                  ///< >= num_tiles.
  int64_t exponent_stride = 0;            ///< int32s from row to row; 0: row_tiles.
  int64_t num_tiles = 0;                  ///< >= 1, of the whole shard.
  /// [num_rows], with what was kept of the target; `weighted` and `mean` must be 0, and there is no
  /// cap.
  const RowGradient* rows = nullptr;
  float* factors = nullptr;  ///< [num_rows]
};

/// Enqueues on `stream` what makes kept exponentials (CachedExponentials in kernels/fused_sm90) of
/// rows whose gradient is linear in the probabilities the gradients of their dot products, but for
/// a factor a row, which is written beside: a row's exponentials become relative to one exponent,
/// and the target's becomes what its gradient wants. Of rows that were kept with a level, next to
/// nothing is left to do. Returns without waiting.
///
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchRebaseExponentials(const RebaseExponentialsParams& params,
                                                   cudaStream_t stream);

}  // namespace logprobd::kernels
