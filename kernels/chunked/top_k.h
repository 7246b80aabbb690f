#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/chunked/logit_chunk.h"
#include "kernels/common/host_device.h"

namespace logprobd::kernels {

inline constexpr int32_t kTopKMax = 128;

/// Inputs and outputs of LaunchTopK. Pointers are device memory and stay the caller's.
struct TopKParams {
  LogitChunk chunk;
  int32_t top_k = 0;         ///< 1 to kTopKMax.
  uint64_t* keys = nullptr;  ///< [num_rows, top_k], best first; see TopKKey. 0 marks a free place.
};

/// Enqueues on `stream` the merge of a chunk into the running best of every row, and returns
/// without waiting. `keys` is all zero before the first chunk. The result is the same for any order
/// and cut of the chunks. Thread-safe.
///
/// Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchTopK(const TopKParams& params, cudaStream_t stream);

/// A logit and its id as one number: the larger logit is larger, among equals the lower id. Never 0
/// for a real id; -0 counts as +0.
struct TopKEntry {
  float logit;
  int32_t id;
};

#ifdef __CUDACC__
__device__ __forceinline__ uint64_t TopKKey(float logit, int32_t id) {
  const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0F));
  const uint32_t ordered = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~id);
}

__device__ __forceinline__ TopKEntry TopKEntryOf(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  const uint32_t bits = (ordered & 0x80000000U) != 0 ? ordered & 0x7FFFFFFFU : ~ordered;
  return {__uint_as_float(bits), static_cast<int32_t>(~static_cast<uint32_t>(key))};
}
#endif

}  // namespace logprobd::kernels
