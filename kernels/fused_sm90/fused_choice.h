#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// Block tiles that the kernel is built for: rows x 192 columns. All give bit-identical results. In
/// swapped tiles the weight is the tensor cores' operand A, so their number of rows need not be a
/// multiple of 64. Except for k64PingPong, tiles come in pairs that share each weight tile.
enum class FusedTile : int32_t {
  k64PingPong,      ///< For up to 64 rows; takes as long as reading the weight.
  k64Pair,          ///< For up to 128 rows.
  k128PingPong,     ///< The epilogue of one tile overlaps the products of the next.
  k256Cooperative,  ///< Has the least operand traffic, but its epilogue overlaps nothing.
  kSwapped80,       ///< Swapped tiles are for numbers of rows that leave few of their rows empty.
  kSwapped96,
  kSwapped112,
};

/// Order in which blocks process their tiles.
enum class FusedRaster : int32_t { kAlongRows, kAlongVocab };

/// Block tile and order of a launch. They affect only the time, never the bits.
struct FusedChoice {
  FusedTile tile;
  FusedRaster raster;
  /// Number of clusters across the raster's direction that are processed together: 1, 2, 4 or 8.
  int32_t swizzle;
};

/// Returns the number of rows of a block tile.
constexpr int64_t TileRows(FusedTile tile) {
  switch (tile) {
    case FusedTile::k64PingPong:
    case FusedTile::k64Pair:
      return 64;
    case FusedTile::k128PingPong:
      return 128;
    case FusedTile::k256Cooperative:
      return 256;
    case FusedTile::kSwapped80:
      return 80;
    case FusedTile::kSwapped96:
      return 96;
    case FusedTile::kSwapped112:
      return 112;
  }
  return 0;
}

/// Returns true if the weight is operand A.
constexpr bool IsSwapped(FusedTile tile) { return tile >= FusedTile::kSwapped80; }

/// Returns the number of blocks of a cluster, which are adjacent along the rows.
constexpr int64_t ClusterBlocks(FusedTile tile) { return tile == FusedTile::k64PingPong ? 1 : 2; }

/// Returns the number of rows that one cluster processes. A partly filled cluster takes as long as
/// a full one.
constexpr int64_t ClusterRows(FusedTile tile) { return TileRows(tile) * ClusterBlocks(tile); }

/// Size of the product that a launch computes.
struct FusedShape {
  int64_t num_rows;   ///< >= 1.
  int64_t num_tiles;  ///< >= 1.
  int64_t depth;      ///< Hidden size times the number of splits.
};

/// Returns the fastest choice for a shape, as measured in tests/bench/FUSED.md.
FusedChoice ChooseFused(const FusedShape& shape);

/// Returns the fastest choice for a launch that caches exponentials, whose instances exist for
/// k128PingPong, kSwapped80 and kSwapped96.
FusedChoice ChooseCaching(const FusedShape& shape);

/// Returns the fastest choice for gradients, whose instances exist for k64Pair, k128PingPong,
/// kSwapped80 and kSwapped96.
FusedChoice ChooseGradient(const FusedShape& shape);

/// Returns the number of rows whose multiples are efficient batch sizes near `shape`: those that
/// leave few rows of a cluster, or of two where the swizzle matters, empty.
int64_t FusedRowStep(const FusedShape& shape);

}  // namespace logprobd::kernels
