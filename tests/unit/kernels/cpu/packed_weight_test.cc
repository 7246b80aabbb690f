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

  PackTile(Dtype::kBf16, {rows.data(), hidden_size}, 192, hidden_size, tile.data());

  for (size_t column = 0; column < 192; ++column) {
    for (size_t k = 0; k < 6; ++k) {
      const size_t at = ((column / 16 * 3 + k / 2) * 16 + column % 16) * 2 + k % 2;
      ASSERT_EQ(tile[at], column * 100 + k) << "column " << column << ", element " << k;
    }
  }
}

/// Checks a tile of `Element`s whose kPair hidden elements of a column are adjacent, for rows that
/// lie apart.
template <typename Element, size_t kPair>
void ExpectLayout(Dtype dtype) {
  constexpr size_t kStride = 100;
  std::vector<Element> rows(192 * kStride);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<Element>(i * 40'503 + 1);
  for (const size_t hidden_size : {1, 4, 7, 8, 9, 16, 29, 97}) {
    SCOPED_TRACE(::testing::Message() << hidden_size << " hidden elements");
    const auto hidden = static_cast<int64_t>(hidden_size);
    const auto packed_hidden = static_cast<size_t>(PackedHidden(dtype, hidden));
    std::vector<Element> tile(192 * packed_hidden, Element{0xFFFF});

    PackTile(dtype, {rows.data(), kStride}, 192, hidden, tile.data());

    for (size_t column = 0; column < 192; ++column) {
      for (size_t k = 0; k < packed_hidden; ++k) {
        const size_t at = (column / 16 * packed_hidden / kPair + k / kPair) * 16 * kPair +
                          column % 16 * kPair + k % kPair;
        const Element expected = k < hidden_size ? rows[column * kStride + k] : Element{0};
        ASSERT_EQ(tile[at], expected) << "column " << column << ", element " << k;
      }
    }
  }
}

TEST(PackedWeightTest, PacksEveryTypeAndAnyNumberOfHiddenElements) {
  ExpectLayout<uint16_t, 2>(Dtype::kBf16);
  ExpectLayout<uint16_t, 1>(Dtype::kF16);
  ExpectLayout<uint32_t, 1>(Dtype::kF32);
}

TEST(PackedWeightTest, PacksATransposedWeight) {
  const std::vector<float> rows = [] {
    std::vector<float> values(192 * 5);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    return values;
  }();
  std::vector<float> transposed(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) transposed[i % 5 * 192 + i / 5] = rows[i];
  std::vector<float> expected(rows.size()), tile(rows.size());

  PackTile(Dtype::kF32, {rows.data(), 5}, 192, 5, expected.data());
  PackTile(Dtype::kF32, {transposed.data(), 1, 192}, 192, 5, tile.data());

  EXPECT_EQ(tile, expected);
}

TEST(PackedWeightTest, AnOddLastElementIsPairedWithZero) {
  const std::vector<uint16_t> rows(192 * 3, 7);
  std::vector<uint16_t> tile(static_cast<size_t>(PackedTileBytes(Dtype::kBf16, 3) / 2), 0xFFFF);

  PackTile(Dtype::kBf16, {rows.data(), 3}, 192, 3, tile.data());

  EXPECT_EQ(tile.size(), 4U * 192);
  EXPECT_EQ(tile[32], 7);
  EXPECT_EQ(tile[33], 0);
}

TEST(PackedWeightTest, ColumnsBeyondTheVocabularyAreZero) {
  const std::vector<float> rows(5 * 4, 2.0F);
  std::vector<float> tile(static_cast<size_t>(PackedTileBytes(Dtype::kF32, 4) / 4), -1.0F);

  PackTile(Dtype::kF32, {rows.data(), 4}, 5, 4, tile.data());

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
