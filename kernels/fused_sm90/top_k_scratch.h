#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// Scratch of LaunchFusedTopK for some rows at once: byte offsets of its parts, 256-byte aligned.
/// Plain C++, so that a plan can be made without a GPU.
struct TopKScratch {
  int64_t order = 0;   ///< Behind the logits, [rows, top_k, 192].
  int64_t groups = 0;  ///< As the next, by what is internal to the search.
  int64_t num_groups = 0;
  int64_t places = 0;
  int64_t ranks = 0;
  int64_t end = 0;  ///< Bytes in all; never less for more rows.
};

/// Fewest (row, tile) pairs that a block multiplies together.
inline constexpr int64_t kTopKGroupPairsMin = 64;
inline constexpr int64_t kTopKGroupBytes = 12;

/// Most groups that pairs are cut into, `group_pairs` of one tile each.
constexpr int64_t MaxTileGroups(int64_t num_pairs, int64_t num_tiles, int64_t group_pairs) {
  return num_pairs / group_pairs + std::min(num_pairs, num_tiles);
}

/// `num_tiles` of the whole vocabulary.
constexpr TopKScratch TopKScratchOf(int64_t num_rows, int32_t top_k, int64_t num_tiles) {
  const auto align = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t pairs = num_rows * top_k;
  const int64_t groups = MaxTileGroups(pairs, num_tiles, kTopKGroupPairsMin);
  TopKScratch scratch;
  scratch.order = align(pairs * kTileColumns * int64_t{sizeof(float)});
  scratch.groups = scratch.order + align(pairs * int64_t{sizeof(int32_t)});
  scratch.num_groups = scratch.groups + align(groups * kTopKGroupBytes);
  scratch.places = scratch.num_groups + align(int64_t{sizeof(int32_t)});
  scratch.ranks = scratch.places + align(num_tiles * int64_t{sizeof(int32_t)});
  scratch.end = scratch.ranks + align(pairs * int64_t{sizeof(int32_t)});
  return scratch;
}

}  // namespace logprobd::kernels
