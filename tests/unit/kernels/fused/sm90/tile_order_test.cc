#include "kernels/fused/sm90/tile_order.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

std::vector<TilePosition> OrderOf(const TileGrid& grid) {
  std::vector<TilePosition> order;
  for (uint32_t i = 0; i < grid.num_lines * grid.line_size; ++i) order.push_back(TileAt(i, grid));
  return order;
}

// Regression: empty tiles filled up groups that did not divide the number of lines, which turned 8
// tiles into 16.
TEST(TileOrderTest, EachTileComesOnce) {
  for (const uint32_t lines : {1, 2, 7, 8, 9, 22, 33}) {
    for (const uint32_t size : {1, 2, 5, 12}) {
      for (const uint32_t lines_max : {1, 2, 4, 8, 12}) {
        std::vector<int> count(lines * size);
        for (const TilePosition& tile : OrderOf({lines, size, lines_max})) {
          ASSERT_LT(tile.line, lines);
          ASSERT_LT(tile.in_line, size);
          ++count[tile.line * size + tile.in_line];
        }
        EXPECT_EQ(std::count(count.begin(), count.end(), 1), lines * size)
            << lines << " lines of " << size << ", groups of " << lines_max;
      }
    }
  }
}

// Regression: 22 lines were processed in groups of 2, because 8 and 4 do not divide 22, which took
// 1.03 times as long.
TEST(TileOrderTest, GroupsDifferByAtMostOneLine) {
  constexpr TileGrid kGrid = {.num_lines = 22, .line_size = 5, .group_lines_max = 8};
  const std::vector<TilePosition> order = OrderOf(kGrid);

  uint32_t first_line = 0;
  auto tile = order.begin();
  for (const uint32_t lines : {7, 7, 8}) {
    const auto end = tile + lines * kGrid.line_size;
    EXPECT_TRUE(std::all_of(tile, end, [&](const TilePosition& position) {
      return position.line >= first_line && position.line < first_line + lines;
    }));
    first_line += lines;
    tile = end;
  }
}

TEST(TileOrderTest, AGroupStartsWhereTheGroupBeforeEnds) {
  for (const TileGrid& grid : {TileGrid{22, 5, 8}, TileGrid{3, 7, 1}, TileGrid{9, 4, 2}}) {
    const std::vector<TilePosition> order = OrderOf(grid);
    for (size_t i = 1; i < order.size(); ++i) {
      const auto step = static_cast<int64_t>(order[i].in_line) - order[i - 1].in_line;
      EXPECT_LE(std::abs(step), 1) << "tile " << i << " of " << grid.num_lines << " lines";
    }
  }
}

}  // namespace
}  // namespace logprobd::kernels
