#include "kernels/fused_sm90/fused_choice.h"

#include <initializer_list>

namespace logprobd::kernels {
namespace {

/// Depth from which the epilogue costs less than a smaller tile's operand traffic.
constexpr int64_t kCooperativeDepthMin = 3'584;
/// Depth from which taking tiles along the vocabulary keeps more in the second-level cache.
constexpr int64_t kAlongVocabDepthMin = 2'560;
/// Depth up to which the weight's tiles of twice as many columns stay there.
constexpr int64_t kWideDepthMax = 1'280;
/// Up to here 128-row tiles are faster at any depth.
constexpr int64_t kFewRowsMax = 1'024;

/// The largest power of two up to `swizzle` that adds no empty tiles of rows, and of columns no
/// more than a thirty-second: both tile counts are rounded up to whole groups of so many
/// (clusters).
int32_t SwizzleOf(const FusedShape& shape, FusedTile tile, int32_t swizzle) {
  const int64_t clusters = (shape.num_rows + ClusterRows(tile) - 1) / ClusterRows(tile);
  const auto adds_too_much = [&](int64_t group) {
    const int64_t columns_added = (group - shape.num_tiles % group) % group;
    return clusters % group != 0 || columns_added * 32 > shape.num_tiles;
  };
  while (swizzle > 1 && adds_too_much(swizzle)) swizzle /= 2;
  return swizzle;
}

}  // namespace

FusedChoice ChooseFused(const FusedShape& shape) {
  for (const FusedTile small : {FusedTile::k64PingPong, FusedTile::k64Pair}) {
    if (shape.num_rows <= ClusterRows(small)) return {small, FusedRaster::kAlongRows, 1};
  }
  if (shape.num_rows <= kFewRowsMax || shape.depth < kCooperativeDepthMin) {
    return ChoosePingPong(shape);
  }
  constexpr FusedTile kCooperative = FusedTile::k256Cooperative;
  return {kCooperative, FusedRaster::kAlongVocab, SwizzleOf(shape, kCooperative, 4)};
}

FusedChoice ChoosePingPong(const FusedShape& shape) {
  constexpr FusedTile kPingPong = FusedTile::k128PingPong;
  if (shape.num_rows <= kFewRowsMax || shape.depth < kAlongVocabDepthMin) {
    const int32_t swizzle = shape.depth <= kWideDepthMax ? 8 : 4;
    return {kPingPong, FusedRaster::kAlongRows, SwizzleOf(shape, kPingPong, swizzle)};
  }
  return {kPingPong, FusedRaster::kAlongVocab, SwizzleOf(shape, kPingPong, 8)};
}

int64_t FusedRowStep(const FusedShape& shape) {
  const int64_t cluster_rows = ClusterRows(ChooseFused(shape).tile);
  // An odd number of clusters leaves no swizzle, the slowest order of tiles; of few clusters one
  // more costs more than that.
  return shape.num_rows <= kFewRowsMax ? cluster_rows : 2 * cluster_rows;
}

}  // namespace logprobd::kernels
