#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// Layout of the scratch memory of LaunchFusedTopK for the rows that it searches at once. The
/// scratch starts with the candidates [rows, CandidatesPerRow]; the other parts follow at these
/// byte offsets, 256-byte aligned. This header is plain C++, so that memory can be planned without
/// a GPU.
struct TopKScratch {
  int64_t order_offset = 0;       ///< int32 [rows, top_k]: pairs sorted by tile.
  int64_t groups_offset = 0;      ///< TileGroup [MaxTileGroups]
  int64_t num_groups_offset = 0;  ///< int32
  int64_t starts_offset = 0;      ///< int32 [num_tiles]: first index in `order` of each tile.
  int64_t ranks_offset = 0;       ///< int32 [rows, top_k]: index of a pair within its tile.
  int64_t size_bytes = 0;         ///< Total size; it does not decrease with more rows.
};

/// Group sizes, ascending: the maximum number of (row, tile) pairs that a block multiplies
/// together.
inline constexpr std::array<int64_t, 3> kTopKGroupPairs = {64, 128, 256};
/// Size of a TileGroup.
inline constexpr int64_t kTopKGroupBytes = 12;

/// Returns the number of entries for the candidates of a row's first `rank` tiles: the i-th tile,
/// counted from 0, can hold top_k - i of the row's top_k largest logits (tile_candidates.cuh).
LOGPROBD_HOST_DEVICE constexpr int64_t CandidatesBefore(int32_t rank, int32_t top_k) {
  return int64_t{rank} * (2 * top_k - rank + 1) / 2;
}

/// Returns the number of entries for the candidates of a row.
LOGPROBD_HOST_DEVICE constexpr int64_t CandidatesPerRow(int32_t top_k) {
  return CandidatesBefore(top_k, top_k);
}

/// Upper bound of the number of groups when each holds up to `group_pairs` pairs of one tile.
constexpr int64_t MaxTileGroups(int64_t num_pairs, int64_t num_tiles, int64_t group_pairs) {
  return num_pairs / group_pairs + std::min(num_pairs, num_tiles);
}

/// Returns the layout for `num_rows` rows; `num_tiles` is the number of tiles of the shard.
constexpr TopKScratch TopKScratchOf(int64_t num_rows, int32_t top_k, int64_t num_tiles) {
  const auto align = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t pairs = num_rows * top_k;
  const int64_t groups = MaxTileGroups(pairs, num_tiles, kTopKGroupPairs.front());
  TopKScratch scratch;
  scratch.order_offset = align(num_rows * CandidatesPerRow(top_k) * int64_t{sizeof(uint64_t)});
  scratch.groups_offset = scratch.order_offset + align(pairs * int64_t{sizeof(int32_t)});
  scratch.num_groups_offset = scratch.groups_offset + align(groups * kTopKGroupBytes);
  scratch.starts_offset = scratch.num_groups_offset + align(int64_t{sizeof(int32_t)});
  scratch.ranks_offset = scratch.starts_offset + align(num_tiles * int64_t{sizeof(int32_t)});
  scratch.size_bytes = scratch.ranks_offset + align(pairs * int64_t{sizeof(int32_t)});
  return scratch;
}

}  // namespace logprobd::kernels
