#include "kernels/fused/choice.h"

#include <algorithm>
#include <cstdint>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

constexpr int64_t kDepths[] = {64, 896, 2'048, 3'072, 4'096, 8'192, 16'384};
constexpr int64_t kManyTiles = 792;

FusedChoice Choose(int64_t num_rows, int64_t depth) {
  return ChooseFused({.num_rows = num_rows, .num_tiles = kManyTiles, .depth = depth});
}

TEST(FusedChoiceTest, FewRowsUseTheTileThatReadsTheWeightFastest) {
  for (const int64_t depth : kDepths) {
    for (const int64_t rows : {1, 63, 64}) {
      EXPECT_EQ(Choose(rows, depth).tile, FusedTile::k64PingPong);
    }
    for (const int64_t rows : {65, 128}) {
      EXPECT_EQ(Choose(rows, depth).tile, FusedTile::k64Pair);
    }
    for (const int64_t rows : {256, 512}) {
      EXPECT_EQ(Choose(rows, depth).tile, FusedTile::k128PingPong);
    }
  }
}

// Regression: 129 rows took as long as 256, and 1,040 rows as long as 1,536.
TEST(FusedChoiceTest, TheTileLeavesFewRowsEmpty) {
  EXPECT_EQ(Choose(129, 4'096).tile, FusedTile::kSwapped80);
  EXPECT_EQ(Choose(192, 4'096).tile, FusedTile::kSwapped96);
  EXPECT_EQ(Choose(193, 4'096).tile, FusedTile::kSwapped112);
  EXPECT_EQ(Choose(256, 4'096).tile, FusedTile::k128PingPong);
  EXPECT_EQ(Choose(448, 4'096).tile, FusedTile::kSwapped112);
  EXPECT_EQ(Choose(1'040, 4'096).tile, FusedTile::kSwapped112);
  EXPECT_EQ(Choose(2'100, 5'376).tile, FusedTile::k128Columns);
  for (const int64_t depth : {896, 1'024, 2'048, 4'096, 4'544}) {
    for (int64_t rows = 129; rows <= 9'000; rows += 13) {
      const int64_t cluster_rows = ClusterRows(Choose(rows, depth).tile);
      const int64_t computed = (rows + cluster_rows - 1) / cluster_rows * cluster_rows;
      EXPECT_LT(computed - rows, std::min<int64_t>(128, rows / 2)) << rows << " rows of " << depth;
    }
  }
}

// Regression: pairs along the rows computed 768 rows for 640, which took 1.15 times as long.
TEST(FusedChoiceTest, AnOddNumberOfBlocksOf128RowsUsesPairsOfColumnTiles) {
  for (const int64_t rows : {384, 640, 1'300, 2'077, 4'872, 8'320}) {
    EXPECT_EQ(Choose(rows, 896).tile, FusedTile::k128Columns) << rows << " rows";
  }
  EXPECT_EQ(Choose(640, 1'024).swizzle, 4);
  EXPECT_EQ(Choose(640, 2'048).swizzle, 2);
  EXPECT_EQ(Choose(8'320, 4'096).raster, FusedRaster::kAlongVocab);
  EXPECT_EQ(Choose(8'320, 4'096).swizzle, 16);
}

// Regression: 256 rows of a vocabulary of 32,000 took 1.2 times as long in blocks of 128 rows,
// whose last epilogue is longer.
TEST(FusedChoiceTest, FewTilesUseBlocksWithAShortEpilogue) {
  const auto tile = [](int64_t rows) {
    return ChooseFused({.num_rows = rows, .num_tiles = 167, .depth = 1'024}).tile;
  };
  for (const int64_t rows : {200, 256, 384, 512}) EXPECT_EQ(tile(rows), FusedTile::k64Pair);
  EXPECT_EQ(tile(2'048), FusedTile::k128PingPong);
}

// Regression: blocks of 128 rows took twice as long for one tile of a thousand rows.
TEST(FusedChoiceTest, TilesThatDoNotFillTheGpuUseTheSmallestBlocks) {
  const auto tile = [](int64_t rows, int64_t num_tiles) {
    return ChooseFused({.num_rows = rows, .num_tiles = num_tiles, .depth = 4'096}).tile;
  };
  for (const int64_t rows : {100, 1'024, 8'192}) EXPECT_EQ(tile(rows, 1), FusedTile::k64PingPong);
  EXPECT_EQ(tile(1'024, 8), FusedTile::k64PingPong);
  EXPECT_EQ(tile(1'024, 9), FusedTile::kSwapped80);
  EXPECT_EQ(tile(8'193, 1), FusedTile::k128PingPong);
}

TEST(FusedChoiceTest, OnlyManyRowsOfADeepProductUseTheCooperativeTile) {
  EXPECT_EQ(Choose(8'192, 7'168).tile, FusedTile::k256Cooperative);
  EXPECT_EQ(Choose(1'024, 7'168).tile, FusedTile::k128PingPong);
  EXPECT_EQ(Choose(8'192, 4'096).tile, FusedTile::k128PingPong);
  EXPECT_EQ(Choose(8'192, 2'048).tile, FusedTile::k128PingPong);
  EXPECT_EQ(Choose(8'192, 896).tile, FusedTile::k128PingPong);
  EXPECT_EQ(Choose(4'096, 5'376).tile, FusedTile::k256Cooperative);
  EXPECT_EQ(Choose(4'096, 4'096).tile, FusedTile::k128PingPong);
  // Its clusters of 512 rows would compute 256 rows more.
  EXPECT_EQ(Choose(2'304, 5'376).tile, FusedTile::k128PingPong);
}

TEST(FusedChoiceTest, TheOrderOfTilesFollowsTheDepth) {
  EXPECT_EQ(Choose(8'192, 896).raster, FusedRaster::kAlongRows);
  EXPECT_EQ(Choose(8'192, 896).swizzle, 8);
  EXPECT_EQ(Choose(8'192, 2'048).raster, FusedRaster::kAlongRows);
  EXPECT_EQ(Choose(8'192, 2'048).swizzle, 4);
  EXPECT_EQ(Choose(8'192, 3'072).raster, FusedRaster::kAlongRows);
  EXPECT_EQ(Choose(8'192, 3'072).swizzle, 4);
  EXPECT_EQ(Choose(8'192, 4'096).raster, FusedRaster::kAlongVocab);
  EXPECT_EQ(Choose(8'192, 4'096).swizzle, 8);
  EXPECT_EQ(Choose(8'192, 7'168).raster, FusedRaster::kAlongVocab);
  EXPECT_EQ(Choose(8'192, 7'168).swizzle, 4);
}

// Regression: the gradients of 307 rows took as long as those of 512.
TEST(FusedChoiceTest, GradientsUseTilesThatLeaveFewRowsEmpty) {
  const auto tile = [](int64_t rows) {
    return ChooseGradient({.num_rows = rows, .num_tiles = kManyTiles, .depth = 4'096}).tile;
  };
  for (const int64_t rows : {1, 64, 128}) EXPECT_EQ(tile(rows), FusedTile::k64Pair);
  for (const int64_t rows : {129, 160, 307, 320}) EXPECT_EQ(tile(rows), FusedTile::kSwapped80);
  for (const int64_t rows : {192, 520}) EXPECT_EQ(tile(rows), FusedTile::kSwapped96);
  EXPECT_EQ(tile(384), FusedTile::k128Columns);
  for (const int64_t rows : {256, 512, 1'024, 8'192}) {
    EXPECT_EQ(tile(rows), FusedTile::k128PingPong);
  }
}

// Regression: 4,096 rows of 4,096 values took 1.06 times as long in swapped tiles, which read all
// hidden rows for each column tile, and two splits of them 1.1 times as long.
TEST(FusedChoiceTest, HiddenRowsBeyondTheCacheAreNotReadForEachColumnTile) {
  EXPECT_EQ(Choose(4'096, 8'192).tile, FusedTile::k256Cooperative);
  EXPECT_EQ(Choose(4'096, 4'096).tile, FusedTile::k128PingPong);
  EXPECT_EQ(Choose(3'072, 4'096).tile, FusedTile::k128PingPong);
  EXPECT_EQ(Choose(4'200, 5'376).tile, FusedTile::k128Columns);
  EXPECT_EQ(Choose(2'100, 8'192).tile, FusedTile::k128Columns);
}

// A gradient is written for every logit, which takes longer from swapped tiles.
TEST(FusedChoiceTest, ShallowProductsOfGradientsUseNoSwappedTiles) {
  for (const int64_t rows : {130, 300, 520, 1'040, 1'300, 2'100}) {
    const FusedTile tile =
        ChooseGradient({.num_rows = rows, .num_tiles = kManyTiles, .depth = 896}).tile;
    EXPECT_FALSE(IsSwapped(tile)) << rows << " rows";
  }
}

// Only some tiles can cache exponentials, even if another tile is fastest for partials.
TEST(FusedChoiceTest, LaunchesThatCacheUseTilesThatLeaveFewRowsEmpty) {
  const auto choose = [](int64_t rows, int64_t depth) {
    return ChooseCaching({.num_rows = rows, .num_tiles = kManyTiles, .depth = depth});
  };
  for (const int64_t rows : {129, 300}) {
    EXPECT_EQ(choose(rows, 4'096).tile, FusedTile::kSwapped80);
  }
  for (const int64_t rows : {192, 520, 2'100}) {
    EXPECT_EQ(choose(rows, 4'096).tile, FusedTile::kSwapped96);
  }
  for (const int64_t depth : kDepths) {
    for (const int64_t rows : {256, 512, 8'192}) {
      const FusedChoice choice = choose(rows, depth);
      const FusedChoice fastest = Choose(rows, depth);
      EXPECT_EQ(choice.tile, FusedTile::k128PingPong) << rows << " rows, depth " << depth;
      if (fastest.tile != FusedTile::k128PingPong) continue;
      EXPECT_EQ(choice.raster, fastest.raster) << rows << " rows, depth " << depth;
      EXPECT_EQ(choice.swizzle, fastest.swizzle) << rows << " rows, depth " << depth;
    }
    EXPECT_EQ(choose(512, depth).raster, FusedRaster::kAlongRows);
  }
  EXPECT_EQ(choose(8'192, 2'048).raster, FusedRaster::kAlongRows);
  EXPECT_EQ(choose(8'192, 7'168).raster, FusedRaster::kAlongVocab);
  EXPECT_EQ(choose(8'192, 7'168).swizzle, 8);
}

TEST(FusedChoiceTest, TheRowStepFollowsTheTilesThatLeaveFewRowsEmpty) {
  const auto step = [](int64_t rows, int64_t depth) {
    return FusedRowStep({.num_rows = rows, .num_tiles = kManyTiles, .depth = depth});
  };
  EXPECT_EQ(step(16, 4'096), 64);
  EXPECT_EQ(step(100, 4'096), 128);
  EXPECT_EQ(step(300, 4'096), 64);
  EXPECT_EQ(step(1'024, 896), 64);
  for (const int64_t rows : {2'048, 2'100, 2'503}) EXPECT_EQ(step(rows, 5'376), 128);
  EXPECT_EQ(step(4'000, 4'096), 128);
  EXPECT_EQ(step(8'192, 896), 128);
  EXPECT_EQ(step(8'192, 7'168), 512);
}

// Regression: tiles of 64 rows were introduced for vocabularies whose tiles all fit on the GPU at
// once, and a test of the engine still expected the step of larger tiles.
TEST(FusedChoiceTest, TheRowStepOfASmallVocabularyIsOneTileOf64Rows) {
  for (const int64_t depth : {896, 4'096}) {
    EXPECT_EQ(FusedRowStep({.num_rows = 300, .num_tiles = 6, .depth = depth}), 64);
  }
}

TEST(FusedChoiceTest, OtherGpusUseTheLargeTileUnlessItLeavesMoreRowsEmpty) {
  for (const int64_t rows : {1, 64, 129, 192, 320, 448}) {
    EXPECT_EQ(ChooseMma(rows).tile, FusedTile::kMma64) << rows << " rows";
  }
  for (const int64_t rows : {65, 128, 193, 256, 1'000, 1'089, 8'192}) {
    EXPECT_EQ(ChooseMma(rows).tile, FusedTile::kMma128) << rows << " rows";
  }
  EXPECT_EQ(RowStepFor(FusedArch::kSm80, {.num_rows = 8'192, .num_tiles = 5, .depth = 64}), 128);
}

}  // namespace
}  // namespace logprobd::kernels
