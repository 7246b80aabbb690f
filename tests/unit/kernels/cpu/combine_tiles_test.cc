#include "kernels/cpu/combine_tiles.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

/// [num_tiles, num_rows] of plausible sums; some tiles are empty, far away or not finite.
std::vector<TileSums> MakeTiles(int64_t num_tiles, int64_t num_rows) {
  std::vector<TileSums> tiles;
  uint32_t state = 7;
  const auto next = [&state] {
    state = state * 1664525U + 1013904223U;
    return static_cast<float>(state >> 8) * 0x1p-24F;
  };
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int64_t row = 0; row < num_rows; ++row) {
      const auto exponent = static_cast<int32_t>(130.0F * next()) - 20;
      const float sum = 0.5F + 191.5F * next();
      tiles.push_back({exponent, sum, -0.53F * 192.0F * next(), sum * next()});
      if (next() < 0.05F) tiles.back() = {kEmptyExponent, 0, 0, 0};
      if (row == 3 && tile == num_tiles / 2) tiles.back() = {kNonfiniteExponent, 0, 0, 0};
    }
  }
  return tiles;
}

TEST(CombineTilesTest, HasTheBitsOfAddTile) {
  constexpr int64_t kRows = 11;
  constexpr int64_t kTiles = 500;
  const std::vector<TileSums> tiles = MakeTiles(kTiles, kRows);
  for (const int64_t begin : {0, 3}) {
    for (int64_t num_rows = 1; num_rows <= kCombineRows; ++num_rows) {
      RowSums rows[kCombineRows];

      CombineTiles(tiles.data() + begin, kTiles, kRows, num_rows, rows);

      for (int64_t row = 0; row < num_rows; ++row) {
        RowSums expected;
        for (int64_t tile = 0; tile < kTiles; ++tile) {
          const TileSums& at = tiles[static_cast<size_t>(tile * kRows + begin + row)];
          expected.exponent = std::max(expected.exponent, at.exponent);
        }
        for (int64_t tile = 0; tile < kTiles; ++tile) {
          AddTile(expected, tiles[static_cast<size_t>(tile * kRows + begin + row)]);
        }
        EXPECT_EQ(rows[row].exponent, expected.exponent);
        EXPECT_EQ(rows[row].sum, expected.sum);
        EXPECT_EQ(rows[row].weighted, expected.weighted);
        EXPECT_EQ(rows[row].sum_squares, expected.sum_squares);
      }
    }
  }
}

}  // namespace
}  // namespace logprobd::kernels
