#include "kernels/fused_sm90/fused_choice.h"

namespace logprobd::kernels {
namespace {

/// Depth from which the epilogue costs less than a smaller tile's operand traffic.
constexpr int64_t kCooperativeDepthMin = 3'584;
/// Depth from which taking tiles along the vocabulary keeps more in the second-level cache.
constexpr int64_t kAlongVocabDepthMin = 2'560;
/// Up to here 128-row tiles are faster at any depth.
constexpr int64_t kFewRowsMax = 1'024;
/// A pair of 128-row blocks: fewer rows leave one of them idle.
constexpr int64_t kPairRowsMin = 129;

/// The largest power of two up to `swizzle` clusters that adds no empty tiles of rows: both tile
/// counts are rounded up to whole groups of them. (A large vocabulary has many times eight tiles.)
int32_t SwizzleOf(int64_t num_rows, FusedTile tile, int32_t swizzle) {
  const int64_t cluster_rows = TileRows(tile) * ClusterBlocks(tile);
  const int64_t clusters = (num_rows + cluster_rows - 1) / cluster_rows;
  while (swizzle > 1 && (clusters + swizzle - 1) / swizzle * swizzle != clusters) swizzle /= 2;
  return swizzle;
}

}  // namespace

FusedChoice ChooseFused(int64_t num_rows, int64_t depth) {
  if (num_rows <= TileRows(FusedTile::k64PingPong)) {
    return {FusedTile::k64PingPong, FusedRaster::kAlongRows, 1};
  }
  if (num_rows < kPairRowsMin) return {FusedTile::k64Pair, FusedRaster::kAlongRows, 1};
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
