#include "kernels/fused_sm90/fused_choice.h"

#include <cstdint>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

constexpr int64_t kDepths[] = {64, 896, 2'048, 3'072, 4'096, 8'192, 16'384};

TEST(FusedChoiceTest, FewRowsTakeTheTileThatReadsTheWeightFastest) {
  for (const int64_t depth : kDepths) {
    for (const int64_t rows : {1, 63, 64}) {
      EXPECT_EQ(ChooseFused(rows, depth).tile, FusedTile::k64PingPong);
    }
    for (const int64_t rows : {65, 128}) {
      EXPECT_EQ(ChooseFused(rows, depth).tile, FusedTile::k64Pair);
    }
  }
}

TEST(FusedChoiceTest, OnlyManyRowsOfADeepProductTakeTheCooperativeTile) {
  EXPECT_EQ(ChooseFused(8'192, 4'096).tile, FusedTile::k256Cooperative);
  EXPECT_EQ(ChooseFused(1'024, 4'096).tile, FusedTile::k128PingPong);
  EXPECT_EQ(ChooseFused(8'192, 2'048).tile, FusedTile::k128PingPong);
  EXPECT_EQ(ChooseFused(8'192, 896).tile, FusedTile::k128PingPong);
}

// Swizzles that do not divide the clusters of rows made 16 tiles of 8: twice the time.
TEST(FusedChoiceTest, TheSwizzleAddsNoEmptyTiles) {
  for (const int64_t depth : kDepths) {
    for (int64_t rows = 1; rows <= 8'192; rows += 61) {
      const FusedChoice choice = ChooseFused(rows, depth);
      const int64_t cluster_rows = TileRows(choice.tile) * ClusterBlocks(choice.tile);
      const int64_t clusters = (rows + cluster_rows - 1) / cluster_rows;
      EXPECT_EQ(clusters % choice.swizzle, 0) << rows << " rows, depth " << depth;
      EXPECT_TRUE(choice.swizzle == 1 || choice.swizzle == 2 || choice.swizzle == 4 ||
                  choice.swizzle == 8);
    }
  }
}

}  // namespace
}  // namespace logprobd::kernels
