#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused_sm90/fused_partials.h"
#include "kernels/fused_sm90/top_k_scratch.h"

namespace logprobd::kernels::internal {

/// Pairs (row, tile) of the same tile that one block multiplies: order[begin, begin + count).
/// `tile` is counted from the shard's first tile.
struct TileGroup {
  int32_t tile;
  int32_t begin;
  int32_t count;
};
static_assert(sizeof(TileGroup) == kTopKGroupBytes);

/// Inputs and outputs of LaunchTileLogits. All pointers except `partials` are device memory.
struct TileLogitsParams {
  /// In host memory; only rows, weight and transform are read.
  const FusedPartialsParams* partials = nullptr;
  int64_t row_begin = 0;  ///< Row of pair 0.
  int32_t pairs_per_row = 0;
  const int32_t* order = nullptr;       ///< [pairs], pairs sorted by tile.
  const TileGroup* groups = nullptr;    ///< [*num_groups]
  const int32_t* num_groups = nullptr;  ///< One number.
  int64_t num_groups_max = 0;           ///< Upper bound of *num_groups, known to the host.
  /// Maximum number of pairs per group, 64 or 192; affects only the time.
  int32_t group_pairs = 0;
  float* logits = nullptr;  ///< [pairs, 192]; columns beyond the vocabulary are unspecified.
};

/// Enqueues the logits of listed (row, tile) pairs on a Hopper GPU. They are bit-identical to the
/// logits of the fused kernel. Returns cudaErrorNotSupported in a build without CUTLASS.
[[nodiscard]] cudaError_t LaunchTileLogits(const TileLogitsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels::internal
