#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// The fused kernels that a GPU runs.
enum class FusedArch : int32_t {
  kNone,  ///< None, because the compute capability is below 8.0.
  kSm80,  ///< Those of kernels/fused/sm80, which every build contains.
  kSm90,  ///< Those of this folder, for compute capability 9.0 and builds with CUTLASS.
};

/// Block tiles that the kernels are built for: rows x 192 columns. On one GPU all give
/// bit-identical results. In swapped tiles the weight is the tensor cores' operand A, so their
/// number of rows need not be a multiple of 64. Except for k64PingPong, k128Columns and the kMma
/// tiles, tiles come in pairs that share each weight tile.
enum class FusedTile : int32_t {
  k64PingPong,      ///< For up to 64 rows; takes as long as reading the weight.
  k64Pair,          ///< For up to 128 rows.
  k128PingPong,     ///< The epilogue of one tile overlaps the products of the next.
  k128Columns,      ///< As k128PingPong, but a pair shares the hidden rows of two column tiles.
  k256Cooperative,  ///< Has the least operand traffic, but its epilogue overlaps nothing.
  kSwapped80,       ///< Swapped tiles are for numbers of rows that leave few of their rows empty.
  kSwapped96,
  kSwapped112,
  kMma64,   ///< kMma tiles are those of kernels/fused/sm80, which runs on any GPU.
  kMma128,  ///< Reads fewer operands per product than kMma64.
};

/// Order in which blocks process their tiles.
enum class FusedRaster : int32_t { kAlongRows, kAlongVocab };

/// Block tile and order of a launch. They affect only the time, never the bits. kMma tiles have one
/// order and ignore the other members.
struct FusedChoice {
  FusedTile tile;
  FusedRaster raster;
  /// Largest number of clusters across the raster's direction that are processed together, >= 1.
  int32_t swizzle;
};

/// Returns the number of rows of a block tile.
constexpr int64_t TileRows(FusedTile tile) {
  switch (tile) {
    case FusedTile::k64PingPong:
    case FusedTile::k64Pair:
    case FusedTile::kMma64:
      return 64;
    case FusedTile::k128PingPong:
    case FusedTile::k128Columns:
    case FusedTile::kMma128:
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

/// Returns true for the block tiles of kernels/fused/sm80.
constexpr bool IsMma(FusedTile tile) { return tile >= FusedTile::kMma64; }

/// Returns true if the weight is operand A.
constexpr bool IsSwapped(FusedTile tile) { return tile >= FusedTile::kSwapped80 && !IsMma(tile); }

/// Returns the number of column tiles that one cluster processes.
constexpr int64_t ClusterColumnTiles(FusedTile tile) {
  return tile == FusedTile::k128Columns ? 2 : 1;
}

/// Returns the number of rows that one cluster processes. A partly filled cluster takes as long as
/// a full one.
constexpr int64_t ClusterRows(FusedTile tile) {
  const bool is_pair_of_rows =
      tile != FusedTile::k64PingPong && tile != FusedTile::k128Columns && !IsMma(tile);
  return TileRows(tile) * (is_pair_of_rows ? 2 : 1);
}

/// Size of the product that a launch computes.
struct FusedShape {
  int64_t num_rows;   ///< >= 1.
  int64_t num_tiles;  ///< >= 1.
  int64_t depth;      ///< Hidden size times the number of splits.
};

/// Returns the fastest choice for a shape on Hopper, as measured in tests/bench/FUSED.md.
FusedChoice ChooseFused(const FusedShape& shape);

/// Returns the choice for a number of rows on other GPUs. It follows from the number of empty rows
/// and the operand traffic of the tiles; it was not measured. The order of tiles is fixed.
FusedChoice ChooseMma(int64_t num_rows);

/// Returns ChooseFused or ChooseMma, depending on the kernels of a GPU.
FusedChoice ChooseFor(FusedArch arch, const FusedShape& shape);

/// Returns the fastest choice on Hopper for a launch that caches exponentials, whose instances
/// exist for k128PingPong, k128Columns, kSwapped80 and kSwapped96.
FusedChoice ChooseCaching(const FusedShape& shape);

/// Returns the fastest choice for gradients, whose instances exist for k64Pair, k128PingPong,
/// k128Columns, kSwapped80 and kSwapped96.
FusedChoice ChooseGradient(const FusedShape& shape);

/// Returns the number of rows whose multiples are efficient batch sizes near `shape` on Hopper:
/// those that leave few rows of a cluster empty.
int64_t FusedRowStep(const FusedShape& shape);

/// Returns FusedRowStep or, on other GPUs than Hopper, the number of rows of the chosen tile.
int64_t RowStepFor(FusedArch arch, const FusedShape& shape);

}  // namespace logprobd::kernels
