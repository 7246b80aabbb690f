#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/chunked/logit_chunk.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchGatherLogits. Pointers are device memory and stay the caller's.
struct GatherLogitsParams {
  LogitChunk chunk;
  const int32_t* rows = nullptr;  ///< [count]; row `row_begin` of the batch is the chunk's row 0.
  const int32_t* ids = nullptr;   ///< [count], ids in the whole vocabulary.
  int32_t row_begin = 0;
  int64_t count = 0;        ///< 0 does nothing.
  float* logits = nullptr;  ///< [count]; written where the chunk holds row and id.
};

/// Enqueues the look-up of single logits on `stream` and returns without waiting. Thread-safe.
/// Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchGatherLogits(const GatherLogitsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
