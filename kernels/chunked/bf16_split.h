#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/terms.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchBf16Split, in device memory, 16-byte aligned.
struct Bf16SplitParams {
  Dtype dtype = Dtype::kF32;           ///< kF32 or kF16.
  const void* in = nullptr;            ///< [num_rows, in_stride]
  int64_t in_stride = 0;               ///< Elements, a multiple of 4, >= hidden_size.
  int64_t num_rows = 0;                ///< 0 to 2^31 - 1; 0 does nothing.
  int64_t hidden_size = 0;             ///< >= 1.
  int32_t num_splits = kHiddenSplits;  ///< 1 (rounds to nearest even) to kHiddenSplitsMax.
  void* out = nullptr;                 ///< [num_rows, num_splits, SplitPitch(hidden_size)] of bf16.
};

/// Enqueues the split of hidden rows into bf16 terms (kernels/common/terms.h) on `stream` and
/// returns without waiting. NaN and Inf stay not finite. Thread-safe. Returns cudaErrorInvalidValue
/// when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchBf16Split(const Bf16SplitParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
