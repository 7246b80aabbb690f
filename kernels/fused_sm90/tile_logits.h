#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused_sm90/fused_partials.h"
#include "kernels/fused_sm90/tile_groups.h"

namespace logprobd::kernels::internal {

/// Inputs and outputs of LaunchTileLogits, in device memory.
struct TileLogitsParams {
  const FusedPartialsParams* partials = nullptr;  ///< Host; rows, weight and transform are used.
  int64_t row_begin = 0;                          ///< Row of pair 0.
  int32_t pairs_per_row = 0;
  const int32_t* order = nullptr;
  const TileGroup* groups = nullptr;
  const int32_t* num_groups = nullptr;
  int64_t num_groups_max = 0;
  int32_t group_pairs = 0;  ///< 64 or 192; bits are the same.
  float* logits = nullptr;  ///< [pairs, 192]; columns beyond the vocabulary hold anything.
};

/// Enqueues the logits of listed (row, tile) pairs: the bits that the fused kernel had.
[[nodiscard]] cudaError_t LaunchTileLogits(const TileLogitsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels::internal
