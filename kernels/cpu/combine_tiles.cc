#include "kernels/cpu/combine_tiles.h"

#include <algorithm>
#include <bit>

namespace logprobd::kernels {
namespace {

/// 2^shift for shift in [-1022, 1023].
double PowerOfTwo(int64_t shift) {
  return std::bit_cast<double>(static_cast<uint64_t>(shift + 1023) << 52);
}

/// ToFixedPoint for |value| < 2^9: adding 1.5 * 2^52 rounds to an integer, nearest and even.
int64_t SmallToFixedPoint(double value) {
  constexpr double kRounder = 0x1.8p52;
  return static_cast<int64_t>((value * kFixedPointOne + kRounder) - kRounder);
}

void Add(RowSums& row, const TileSums& tile) {
  if (tile.exponent == kEmptyExponent || row.exponent == kNonfiniteExponent) return;
  const int64_t shift = static_cast<int64_t>(tile.exponent) - row.exponent;
  if (shift <= -100) return;
  const double factor = PowerOfTwo(shift);
  const auto sum = static_cast<double>(tile.sum);
  row.sum += SmallToFixedPoint(sum * factor);
  row.weighted += SmallToFixedPoint(
      (static_cast<double>(tile.weighted) + static_cast<double>(shift) * sum) * factor);
  row.sum_squares += SmallToFixedPoint(static_cast<double>(tile.sum_squares) * factor * factor);
}

}  // namespace

void MaxExponents(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
                  RowSums* rows) {
  std::fill_n(rows, num_rows, RowSums{});
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const TileSums* at = tiles + tile * tile_stride;
    for (int64_t row = 0; row < num_rows; ++row) {
      rows[row].exponent = std::max(rows[row].exponent, at[row].exponent);
    }
  }
}

void AddTiles(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
              RowSums* rows) {
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const TileSums* at = tiles + tile * tile_stride;
    for (int64_t row = 0; row < num_rows; ++row) Add(rows[row], at[row]);
  }
}

void CombineTiles(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
                  RowSums* rows) {
  MaxExponents(tiles, num_tiles, tile_stride, num_rows, rows);
  AddTiles(tiles, num_tiles, tile_stride, num_rows, rows);
}

}  // namespace logprobd::kernels
