#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/logit_key.h"
#include "kernels/fused_sm90/fused_partials.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchFusedTopK. Pointers are device memory and stay the caller's.
struct FusedTopKParams {
  /// What LaunchFusedPartials was given; `tile_max` must have been asked. The search is among these
  /// tiles, and the rows are known: no row_count.
  FusedPartialsParams partials;
  int32_t top_k = 0;  ///< 1 to kTopKMax.
  /// [num_rows, top_k], LogitKeys with ids of the whole vocabulary, best first; 0 marks a free
  /// place.
  uint64_t* keys = nullptr;
  /// Scratch, 256-byte aligned. May be where tile_max, sums and entropy_sums lie, if those are no
  /// longer needed; `keys` must lie outside.
  std::byte* workspace = nullptr;
  /// At least TopKScratchOf one row and the shard's tiles; where it is less than that of all rows,
  /// they are searched in parts.
  int64_t workspace_bytes = 0;
};

/// Enqueues the search for each row's largest logits on `stream` and returns without waiting. The
/// k largest lie in the k tiles with the largest maxima (ties go to the lower column on both
/// levels), so only those tiles' logits are made once more, with the same bits. The lists are those
/// that LaunchTopK gives.
///
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, cudaErrorNotSupported in a
/// build without CUTLASS, else the launch's own error.
[[nodiscard]] cudaError_t LaunchFusedTopK(const FusedTopKParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
