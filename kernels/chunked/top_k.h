#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/chunked/logit_chunk.h"
#include "kernels/common/logit_key.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchTopK. Pointers are device memory and stay the caller's.
struct TopKParams {
  LogitChunk chunk;
  int32_t top_k = 0;         ///< 1 to kTopKMax.
  uint64_t* keys = nullptr;  ///< [num_rows, top_k], best first; see LogitKey. 0 marks a free place.
};

/// Enqueues on `stream` the merge of a chunk into the running best of every row, and returns
/// without waiting. `keys` is all zero before the first chunk. The result is the same for any order
/// and cut of the chunks. Thread-safe.
///
/// Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchTopK(const TopKParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
