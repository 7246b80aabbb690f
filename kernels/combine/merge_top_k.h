#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/logit_key.h"

namespace logprobd::kernels {

/// Most shards whose lists are merged.
inline constexpr int32_t kMergeShardsMax = 16;

/// Inputs and outputs of LaunchMergeTopK. Pointers are device memory and stay the caller's.
struct MergeTopKParams {
  int64_t num_rows = 0;    ///< 0 to 2^31 - 1; 0 does nothing.
  int32_t top_k = 0;       ///< 1 to kTopKMax.
  int32_t num_shards = 0;  ///< 1 to kMergeShardsMax.
  /// [num_shards, num_rows, top_k], LogitKeys, each list best first; 0 marks a free place.
  const uint64_t* gathered = nullptr;
  uint64_t* keys = nullptr;  ///< [num_rows, top_k], the best of all lists, best first; no alias.
};

/// Enqueues the merge of the shards' lists of every row on `stream` and returns without waiting.
/// Keys are distinct but for free places, so the order of shards does not show.
///
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchMergeTopK(const MergeTopKParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
