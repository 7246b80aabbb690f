#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// Scratch of LaunchFusedTopK for some rows at once: byte offsets of its parts behind the logits
/// [rows, top_k, 192], 256-byte aligned. Plain C++, so that a plan can be made without a GPU.
struct TopKScratch {
  int64_t order_offset = 0;       ///< int32 [rows, top_k]: pairs sorted by tile.
  int64_t groups_offset = 0;      ///< TileGroup [MaxTileGroups]
  int64_t num_groups_offset = 0;  ///< int32
  int64_t places_offset = 0;      ///< int32 [num_tiles]
  int64_t ranks_offset = 0;       ///< int32 [rows, top_k]
  int64_t size_bytes = 0;         ///< Of all; never less for more rows.
};

/// Fewest (row, tile) pairs that a block multiplies together.
inline constexpr int64_t kTopKGroupPairsMin = 64;
inline constexpr int64_t kTopKGroupBytes = 12;

/// Most groups that pairs are cut into, `group_pairs` of one tile each.
constexpr int64_t MaxTileGroups(int64_t num_pairs, int64_t num_tiles, int64_t group_pairs) {
  return num_pairs / group_pairs + std::min(num_pairs, num_tiles);
}

/// `num_tiles` to search: the shard's.
constexpr TopKScratch TopKScratchOf(int64_t num_rows, int32_t top_k, int64_t num_tiles) {
  const auto align = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t pairs = num_rows * top_k;
  const int64_t groups = MaxTileGroups(pairs, num_tiles, kTopKGroupPairsMin);
  TopKScratch scratch;
  scratch.order_offset = align(pairs * kTileColumns * int64_t{sizeof(float)});
  scratch.groups_offset = scratch.order_offset + align(pairs * int64_t{sizeof(int32_t)});
  scratch.num_groups_offset = scratch.groups_offset + align(groups * kTopKGroupBytes);
  scratch.places_offset = scratch.num_groups_offset + align(int64_t{sizeof(int32_t)});
  scratch.ranks_offset = scratch.places_offset + align(num_tiles * int64_t{sizeof(int32_t)});
  scratch.size_bytes = scratch.ranks_offset + align(pairs * int64_t{sizeof(int32_t)});
  return scratch;
}

}  // namespace logprobd::kernels
