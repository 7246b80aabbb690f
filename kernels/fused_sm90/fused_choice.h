#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// The block tiles that the kernel was built for: rows x 192 columns. All give the same bits.
enum class FusedTile : int32_t {
  k64PingPong,      ///< Up to 64 rows: as fast as the weight can be read.
  k64Pair,          ///< Two blocks read the weight's tile together: up to 128, 257 to 384.
  k128PingPong,     ///< One tile's epilogue hides behind the next one's products.
  k256Cooperative,  ///< Least operand traffic; its epilogue stands alone.
};

/// The order in which blocks take their tiles.
enum class FusedRaster : int32_t { kAlongRows, kAlongVocab };

struct FusedChoice {
  FusedTile tile;
  FusedRaster raster;
  /// Tiles across the raster's direction that are taken together, in clusters: 1, 2, 4 or 8.
  int32_t swizzle;
};

/// Rows of a block tile, and blocks of a cluster (along the rows).
constexpr int64_t TileRows(FusedTile tile) {
  switch (tile) {
    case FusedTile::k64PingPong:
    case FusedTile::k64Pair:
      return 64;
    case FusedTile::k128PingPong:
      return 128;
    case FusedTile::k256Cooperative:
      return 256;
  }
  return 0;
}
constexpr int64_t ClusterBlocks(FusedTile tile) { return tile == FusedTile::k64PingPong ? 1 : 2; }

/// Rows that one cluster takes: those beyond a multiple take as long as a whole cluster's.
constexpr int64_t ClusterRows(FusedTile tile) { return TileRows(tile) * ClusterBlocks(tile); }

/// What a launch multiplies.
struct FusedShape {
  int64_t num_rows;   ///< >= 1.
  int64_t num_tiles;  ///< >= 1.
  int64_t depth;      ///< Hidden size times terms.
};

/// What is fastest for it. Measured: README.md.
FusedChoice ChooseFused(const FusedShape& shape);

/// The same for tiles of 128 rows alone: those that keep exponentials are built of no others.
FusedChoice ChoosePingPong(const FusedShape& shape);

/// What is fastest for gradients, which are made by tiles of 64 rows in pairs, and of 128.
FusedChoice ChooseGradient(const FusedShape& shape);

/// Rows in whose multiples a shape as large as `shape` is computed best: a cluster's, or those of
/// two where a swizzle matters.
int64_t FusedRowStep(const FusedShape& shape);

}  // namespace logprobd::kernels
