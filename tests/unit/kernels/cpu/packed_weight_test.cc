#include "kernels/cpu/packed_weight.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

TEST(PackedWeightTest, StoresBf16InPairsOfHiddenElements) {
  const int64_t hidden_size = 6;
  std::vector<uint16_t> rows;
  for (uint16_t column = 0; column < 192; ++column) {
    for (uint16_t k = 0; k < 6; ++k) rows.push_back(static_cast<uint16_t>(column * 100 + k));
  }
  std::vector<uint16_t> tile(static_cast<size_t>(PackedTileBytes(Dtype::kBf16, hidden_size) / 2),
                             0xFFFF);

  PackTile(Dtype::kBf16, rows.data(), 192, hidden_size, tile.data());

  for (size_t column = 0; column < 192; ++column) {
    for (size_t k = 0; k < 6; ++k) {
      const size_t at = ((column / 16 * 3 + k / 2) * 16 + column % 16) * 2 + k % 2;
      ASSERT_EQ(tile[at], column * 100 + k) << "column " << column << ", element " << k;
    }
  }
}

TEST(PackedWeightTest, AnOddLastElementIsPairedWithZero) {
  const std::vector<uint16_t> rows(192 * 3, 7);
  std::vector<uint16_t> tile(static_cast<size_t>(PackedTileBytes(Dtype::kBf16, 3) / 2), 0xFFFF);

  PackTile(Dtype::kBf16, rows.data(), 192, 3, tile.data());

  EXPECT_EQ(tile.size(), 4U * 192);
  EXPECT_EQ(tile[32], 7);
  EXPECT_EQ(tile[33], 0);
}

TEST(PackedWeightTest, ColumnsBeyondTheVocabularyAreZero) {
  const std::vector<float> rows(5 * 4, 2.0F);
  std::vector<float> tile(static_cast<size_t>(PackedTileBytes(Dtype::kF32, 4) / 4), -1.0F);

  PackTile(Dtype::kF32, rows.data(), 5, 4, tile.data());

  EXPECT_EQ(tile[4], 2.0F);
  EXPECT_EQ(tile[5], 0.0F);
  EXPECT_EQ(tile[15], 0.0F);
  EXPECT_EQ(tile.back(), 0.0F);
}

TEST(PackedWeightTest, HasTheSizeOfWholeTiles) {
  EXPECT_EQ(PackedWeightBytes(Dtype::kBf16, 1024, 151'936), int64_t{792} * 192 * 1024 * 2);
  EXPECT_EQ(PackedWeightBytes(Dtype::kF32, 3, 1), 192 * 3 * 4);
}

}  // namespace
}  // namespace logprobd::kernels
