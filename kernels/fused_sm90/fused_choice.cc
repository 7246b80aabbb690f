#include "kernels/fused_sm90/fused_choice.h"

namespace logprobd::kernels {
namespace {

/// Smallest depth at which the exposed epilogue of k256Cooperative costs less than the operand
/// traffic of smaller tiles.
constexpr int64_t kCooperativeDepthMin = 3'584;
/// Smallest depth at which the order along the vocabulary has more hits in the second-level cache.
constexpr int64_t kAlongVocabDepthMin = 2'560;
/// Largest depth at which the weight tiles of twice as many columns fit into the second-level
/// cache.
constexpr int64_t kWideDepthMax = 1'280;
/// Largest number of rows for which 128-row tiles are faster at any depth.
constexpr int64_t kFewRowsMax = 1'024;

/// Number of blocks that run at once, just below the number of multiprocessors of a GPU.
constexpr int64_t kBlocksAtOnce = 128;

constexpr FusedChoice kPair = {FusedTile::k64Pair, FusedRaster::kAlongRows, 1};

/// Returns true when pairs of 64-row tiles are fastest: when one pair is enough, or when three
/// pairs process a quarter fewer rows than two pairs of 128-row tiles. tests/bench/FUSED.md has the
/// measurements.
bool FitsPairs(int64_t num_rows) {
  constexpr int64_t kPairRows = ClusterRows(FusedTile::k64Pair);
  return num_rows <= kPairRows || (num_rows > 2 * kPairRows && num_rows <= 3 * kPairRows);
}

/// Returns true when there are so few tiles that even the smallest blocks do not fill the GPU.
/// Blocks that share nothing then finish first.
bool FitsAtOnce(const FusedShape& shape) {
  constexpr int64_t kBlockRows = TileRows(FusedTile::k64PingPong);
  return (shape.num_rows + kBlockRows - 1) / kBlockRows * shape.num_tiles <= kBlocksAtOnce;
}

/// Returns the largest power of two up to `swizzle` that adds no empty row tiles and at most 1/32
/// empty column tiles. The number of row clusters and the number of column tiles are both rounded
/// up to a multiple of the swizzle.
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
  if (shape.num_rows <= ClusterRows(FusedTile::k64PingPong) || FitsAtOnce(shape)) {
    return {FusedTile::k64PingPong, FusedRaster::kAlongRows, 1};
  }
  if (FitsPairs(shape.num_rows)) return kPair;
  if (shape.num_rows <= kFewRowsMax || shape.depth < kCooperativeDepthMin) {
    return ChoosePingPong(shape);
  }
  constexpr FusedTile kCooperative = FusedTile::k256Cooperative;
  return {kCooperative, FusedRaster::kAlongVocab, SwizzleOf(shape, kCooperative, 4)};
}

FusedChoice ChooseGradient(const FusedShape& shape) {
  return FitsPairs(shape.num_rows) ? kPair : ChoosePingPong(shape);
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
  FusedTile tile = ChooseFused(shape).tile;
  // Three pairs are faster than four, but two or four pairs have a lower cost per row.
  if (shape.num_rows > ClusterRows(FusedTile::k64Pair) && tile == FusedTile::k64Pair) {
    tile = FusedTile::k128PingPong;
  }
  const int64_t cluster_rows = ClusterRows(tile);
  // With an odd number of clusters no swizzle is possible, which gives the slowest order of tiles.
  // With few clusters, an additional cluster costs more than that.
  return shape.num_rows <= kFewRowsMax ? cluster_rows : 2 * cluster_rows;
}

}  // namespace logprobd::kernels
