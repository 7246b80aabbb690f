#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused_sm90/top_k_scratch.h"

namespace logprobd::kernels::internal {

/// Pairs of one tile, counted from the shard's first, that are multiplied together:
/// order[begin, begin + count).
struct TileGroup {
  int32_t tile;
  int32_t begin;
  int32_t count;
};

/// Inputs and outputs of LaunchTileGroups, in device memory.
struct TileGroupsParams {
  /// [num_pairs]: LogitKeys whose ids are tiles, counted from the shard's first; 0 is none.
  const uint64_t* tile_keys = nullptr;
  int32_t num_pairs = 0;        ///< >= 1.
  int32_t num_tiles = 0;        ///< The shard's.
  int32_t group_pairs = 0;      ///< Most pairs of a group.
  int32_t* places = nullptr;    ///< [num_tiles], scratch.
  int32_t* ranks = nullptr;     ///< [num_pairs], scratch.
  int32_t* order = nullptr;     ///< [num_pairs]: pairs of one tile lie together.
  TileGroup* groups = nullptr;  ///< [MaxTileGroups]
  int32_t* num_groups = nullptr;
};

static_assert(sizeof(TileGroup) == kTopKGroupBytes);

/// Enqueues the sorting of (row, tile) pairs by their tile. The order within a tile is any.
[[nodiscard]] cudaError_t LaunchTileGroups(const TileGroupsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels::internal
