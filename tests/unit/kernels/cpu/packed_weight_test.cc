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

/// Checks tiles of `Element`s whose kPair hidden elements of a column are adjacent, for rows that
/// lie apart, and for a transposed weight. Columns beyond `num_columns` are zero.
template <typename Element, size_t kPair>
void ExpectLayout(Dtype dtype) {
  constexpr size_t kStride = 100;
  std::vector<Element> rows(192 * kStride);
  std::vector<Element> transposed(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<Element>(i * 40'503 + 1);
    transposed[i % kStride * 192 + i / kStride] = rows[i];
  }
  for (const size_t num_columns : {1, 5, 15, 16, 17, 100, 191, 192}) {
    for (const size_t hidden_size : {1, 4, 7, 8, 9, 16, 29, 97}) {
      SCOPED_TRACE(::testing::Message()
                   << num_columns << " columns, " << hidden_size << " hidden elements");
      const auto hidden = static_cast<int64_t>(hidden_size);
      const auto packed_hidden = static_cast<size_t>(PackedHidden(dtype, hidden));
      std::vector<Element> tile(192 * packed_hidden, Element{0xFFFF});
      std::vector<Element> of_transposed(tile);

      PackTile(dtype, {rows.data(), kStride}, static_cast<int64_t>(num_columns), hidden,
               tile.data());
      PackTile(dtype, {transposed.data(), 1, 192}, static_cast<int64_t>(num_columns), hidden,
               of_transposed.data());

      for (size_t column = 0; column < 192; ++column) {
        for (size_t k = 0; k < packed_hidden; ++k) {
          const size_t at = (column / 16 * packed_hidden / kPair + k / kPair) * 16 * kPair +
                            column % 16 * kPair + k % kPair;
          const bool is_real = column < num_columns && k < hidden_size;
          const Element expected = is_real ? rows[column * kStride + k] : Element{0};
          ASSERT_EQ(tile[at], expected) << "column " << column << ", element " << k;
        }
      }
      ASSERT_EQ(of_transposed, tile);
    }
  }
}

TEST(PackedWeightTest, PacksEveryTypeAndAnyNumberOfColumnsAndHiddenElements) {
  ExpectLayout<uint16_t, 2>(Dtype::kBf16);
  ExpectLayout<uint16_t, 1>(Dtype::kF16);
  ExpectLayout<uint32_t, 1>(Dtype::kF32);
}

TEST(PackedWeightTest, APartOfAWeightBeginsAtItsColumnAndElement) {
  const std::vector<float> floats(100);
  const std::vector<uint16_t> halves(100);

  const StridedWeight part = StridedWeight{floats.data(), 10, 2}.From(Dtype::kF32, 3, 4);

  EXPECT_EQ(part.data, floats.data() + 3 * 10 + 4 * 2);
  EXPECT_EQ(part.row_stride, 10);
  EXPECT_EQ(part.element_stride, 2);
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    EXPECT_EQ((StridedWeight{halves.data(), 20}.From(dtype, 2, 5).data), halves.data() + 45);
  }
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
