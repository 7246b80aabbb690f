#include "kernels/fused_sm90/fused_choice.h"

#include <initializer_list>

namespace logprobd::kernels {
namespace {

/// Depth from which the epilogue costs less than a smaller tile's operand traffic.
constexpr int64_t kCooperativeDepthMin = 3'584;
/// Depth from which taking tiles along the vocabulary keeps more in the second-level cache.
constexpr int64_t kAlongVocabDepthMin = 2'560;
/// Up to here 128-row tiles are faster at any depth.
constexpr int64_t kFewRowsMax = 1'024;

/// Rows that one cluster takes.
constexpr int64_t ClusterRows(FusedTile tile) { return TileRows(tile) * ClusterBlocks(tile); }

/// The largest power of two up to `swizzle` clusters that adds no empty tiles of rows: both tile
/// counts are rounded up to whole groups of them. (A large vocabulary has many times eight tiles.)
int32_t SwizzleOf(int64_t num_rows, FusedTile tile, int32_t swizzle) {
  const int64_t clusters = (num_rows + ClusterRows(tile) - 1) / ClusterRows(tile);
  while (swizzle > 1 && clusters % swizzle != 0) swizzle /= 2;
  return swizzle;
}

}  // namespace

FusedChoice ChooseFused(int64_t num_rows, int64_t depth) {
  for (const FusedTile small : {FusedTile::k64PingPong, FusedTile::k64Pair}) {
    if (num_rows <= ClusterRows(small)) return {small, FusedRaster::kAlongRows, 1};
  }
  constexpr FusedTile kPingPong = FusedTile::k128PingPong;
  if (num_rows <= kFewRowsMax || depth < kAlongVocabDepthMin) {
    return {kPingPong, FusedRaster::kAlongRows, SwizzleOf(num_rows, kPingPong, 4)};
  }
  if (depth < kCooperativeDepthMin) {
    return {kPingPong, FusedRaster::kAlongVocab, SwizzleOf(num_rows, kPingPong, 8)};
  }
  constexpr FusedTile kCooperative = FusedTile::k256Cooperative;
  return {kCooperative, FusedRaster::kAlongVocab, SwizzleOf(num_rows, kCooperative, 4)};
}

}  // namespace logprobd::kernels
