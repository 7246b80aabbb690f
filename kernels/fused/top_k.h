#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/logit_key.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/params.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchFusedTopK. Pointers point to device memory that the caller owns.
struct FusedTopKParams {
  /// Parameters of the call of LaunchFusedPartials that computed `tile_max`. The search covers its
  /// tiles. row_count must be null.
  FusedPartialsParams partials;
  int32_t top_k = 0;  ///< 1 to kTopKMax.
  /// [num_rows, top_k], LogitKeys with ids of the whole vocabulary, best first; 0 marks an empty
  /// slot.
  uint64_t* keys = nullptr;
  /// Scratch memory, 256-byte aligned. May overlap tile_max, sums and entropy_sums if they are no
  /// longer needed, but not `keys`.
  std::byte* workspace = nullptr;
  /// At least the size that TopKScratchOf (top_k_scratch.h) returns for one row and the shard's
  /// tiles. If it is less than the size for all rows, the rows are searched in parts.
  int64_t workspace_bytes = 0;
};

/// Enqueues the search for each row's largest logits on `stream` and returns without waiting. The k
/// largest logits lie in the k tiles with the largest maxima (in both cases the lower column
/// precedes at a tie), so only the logits of those tiles are recomputed, with the same bits. The
/// lists are the same as those that LaunchTopK computes.
///
/// Thread-safe. Returns cudaErrorNotSupported below compute capability 8.0, cudaErrorInvalidValue
/// if a parameter is out of range, otherwise the error of the launch.
[[nodiscard]] cudaError_t LaunchFusedTopK(const FusedTopKParams& params, cudaStream_t stream);

/// Does the same with the kernels of `arch`, which the current device must run. It is meant for
/// tests.
[[nodiscard]] cudaError_t LaunchFusedTopKAs(const FusedTopKParams& params, FusedArch arch,
                                            cudaStream_t stream);

}  // namespace logprobd::kernels
