#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchBf16Split. Pointers point to device memory that the caller owns and
/// are 16-byte aligned.
struct Bf16SplitParams {
  Dtype dtype = Dtype::kF32;           ///< Element type of `in`, kF32 or kF16.
  const void* in = nullptr;            ///< [num_rows, in_stride]
  int64_t in_stride = 0;               ///< Elements, a multiple of 4, >= hidden_size.
  int64_t num_rows = 0;                ///< 0 to 2^31 - 1; 0 does nothing.
  int64_t hidden_size = 0;             ///< >= 1.
  int32_t num_splits = kHiddenSplits;  ///< 1 (rounds to nearest even) to kHiddenSplitsMax.
  void* out = nullptr;  ///< [num_rows, num_splits, SplitPitch(hidden_size)] of bf16, written.
};

/// Enqueues on `stream` the split of hidden rows into bf16 splits (kernels/common/dtype.h) and
/// returns without waiting. NaN and Inf stay not finite.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the error
/// of the launch.
[[nodiscard]] cudaError_t LaunchBf16Split(const Bf16SplitParams& params, cudaStream_t stream);

/// Enqueues on `stream` the exact conversion of `count` elements of `dtype` (kBf16 or kF16) at `in`
/// to fp32 at `out`, and returns without waiting. `in` and `out` point to device memory aligned to
/// 16 bytes; `count` is a multiple of 8.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the error
/// of the launch.
[[nodiscard]] cudaError_t LaunchWiden(const void* in, Dtype dtype, int64_t count, float* out,
                                      cudaStream_t stream);

}  // namespace logprobd::kernels
