#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_ops/row_source.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchRowOperands. Pointers are device memory and stay the caller's.
struct RowOperandsParams {
  int64_t num_rows = 0;  ///< 0 to 2^31 - 1; 0 does nothing.
  RowSource source;
  float* log2_scales = nullptr;       ///< [num_rows], as these:
  int32_t* target_columns = nullptr;  ///< -1 where the shard does not have the target.
  float* target_logits = nullptr;     ///< Set to 0.
  uint64_t* max_keys = nullptr;       ///< Set to 0; or null.
};

/// Enqueues on `stream` what LaunchFusedPartials needs of each row and returns without waiting.
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchRowOperands(const RowOperandsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
