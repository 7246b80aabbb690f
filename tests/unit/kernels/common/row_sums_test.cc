#include "kernels/common/row_sums.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {
namespace {

/// Makes tiles with plausible sums and exponents in [0, exponent_range].
std::vector<TileSums> MakeTiles(int num_tiles, int exponent_range) {
  std::vector<TileSums> tiles;
  uint32_t state = 12345;
  const auto next = [&state] {
    state = state * 1664525U + 1013904223U;
    return static_cast<float>(state >> 8) * 0x1p-24F;
  };
  for (int i = 0; i < num_tiles; ++i) {
    const auto exponent = static_cast<int32_t>(next() * static_cast<float>(exponent_range));
    const float sum = 0.5F + 191.0F * next();
    tiles.push_back({exponent, sum, -20.0F * sum * next(), 0.25F + sum * next()});
  }
  return tiles;
}

int32_t LargestExponent(std::span<const TileSums> tiles) {
  int32_t exponent = kEmptyExponent;
  for (const TileSums& tile : tiles) exponent = std::max(exponent, tile.exponent);
  return exponent;
}

RowSums Combine(std::span<const TileSums> tiles, int32_t exponent) {
  RowSums row;
  row.exponent = exponent;
  for (const TileSums& tile : tiles) AddTile(row, tile);
  return row;
}

RowSums CombineAll(std::span<const TileSums> tiles) {
  return Combine(tiles, LargestExponent(tiles));
}

TEST(RowSumsTest, AnySplitOfTheTilesGivesTheSameBits) {
  const std::vector<TileSums> tiles = MakeTiles(300, 80);
  const int32_t exponent = LargestExponent(tiles);
  const RowSums whole = Combine(tiles, exponent);

  for (const size_t split : {1U, 7U, 100U, 150U, 299U}) {
    const RowSums left = Combine({tiles.data(), split}, exponent);
    const RowSums right = Combine({tiles.data() + split, tiles.size() - split}, exponent);

    EXPECT_EQ(left.sum + right.sum, whole.sum);
    EXPECT_EQ(left.weighted + right.weighted, whole.weighted);
    EXPECT_EQ(left.sum_squares + right.sum_squares, whole.sum_squares);
  }
}

TEST(RowSumsTest, TheOrderOfTheTilesDoesNotMatter) {
  std::vector<TileSums> tiles = MakeTiles(300, 80);
  const RowSums forward = CombineAll(tiles);

  std::reverse(tiles.begin(), tiles.end());
  const RowSums backward = CombineAll(tiles);

  EXPECT_EQ(forward.sum, backward.sum);
  EXPECT_EQ(forward.weighted, backward.weighted);
}

TEST(RowSumsTest, OneFlatTileHasTheEntropyOfItsColumns) {
  const RowSums row = CombineAll(std::vector<TileSums>{{0, 192.0F, 0.0F, 192.0F}});
  const RowNormalizer normalizer = NormalizerOf(row);

  EXPECT_TRUE(normalizer.finite);
  EXPECT_FLOAT_EQ(LogprobOf(0.0F, Log2Scale(1), normalizer), -std::log(192.0F));
  EXPECT_FLOAT_EQ(EntropyOf(row, normalizer, 192), std::log(192.0F));
  EXPECT_FLOAT_EQ(LseOf(normalizer), std::log(192.0F));
  EXPECT_FLOAT_EQ(SumPSquaredOf(row, normalizer), 1.0F / 192.0F);
}

TEST(RowSumsTest, TwoTilesAreRebasedToTheLargerExponent) {
  // Each tile has one column, with exponentials 2^3 and 2^0, so p = 8/9 and 1/9.
  const RowSums row = CombineAll(std::vector<TileSums>{{3, 1, 0, 1}, {0, 1, 0, 1}});
  const RowNormalizer normalizer = NormalizerOf(row);

  const auto ln2 = static_cast<float>(kLn2);
  EXPECT_FLOAT_EQ(LogprobOf(3 * ln2, Log2Scale(1), normalizer), std::log(8.0F / 9.0F));
  EXPECT_FLOAT_EQ(LogprobOf(0.0F, Log2Scale(1), normalizer), std::log(1.0F / 9.0F));
  const double entropy = -(8.0 / 9 * std::log(8.0 / 9) + 1.0 / 9 * std::log(1.0 / 9));
  EXPECT_NEAR(EntropyOf(row, normalizer, 2), entropy, 1e-7);
  EXPECT_NEAR(SumPSquaredOf(row, normalizer), 65.0 / 81.0, 1e-7);
}

TEST(RowSumsTest, ATileFarBelowAddsNothing) {
  const RowSums row = CombineAll(std::vector<TileSums>{{0, 1, 0, 1}, {-100, 192, 0, 192}});

  EXPECT_EQ(row.sum, ToFixedPoint(1.0));
}

TEST(RowSumsTest, OneNonfiniteTileMakesTheRowNonfinite) {
  const RowSums row =
      CombineAll(std::vector<TileSums>{{0, 1, 0, 1}, {kNonfiniteExponent, 0, 0, 0}});
  const RowNormalizer normalizer = NormalizerOf(row);

  EXPECT_FALSE(normalizer.finite);
  EXPECT_TRUE(std::isnan(LogprobOf(0.0F, 1.0F, normalizer)));
  EXPECT_TRUE(std::isnan(EntropyOf(row, normalizer, 10)));
  EXPECT_TRUE(std::isnan(LseOf(normalizer)));
  EXPECT_TRUE(std::isnan(SumPSquaredOf(row, normalizer)));
}

TEST(RowSumsTest, EmptyTilesAddNothingAndEmptyRowsAreNonfinite) {
  const TileSums empty = {kEmptyExponent, 0, 0, 0};

  EXPECT_EQ(CombineAll(std::vector<TileSums>{empty, {2, 1, 0, 1}}).sum, ToFixedPoint(1.0));
  EXPECT_FALSE(NormalizerOf(CombineAll(std::vector<TileSums>{empty, empty})).finite);
}

TEST(RowSumsTest, TheLargestVocabularyDoesNotOverflow) {
  // There are 2^20 columns. In the first case all have the largest |x 2^x| (x = -1.4427), in the
  // second case the largest 2^x (x = 0).
  const int num_tiles = (1 << 20) / kTileColumns;
  for (const TileSums tile : {TileSums{0, 70.63F, -101.9F, 25.99F}, TileSums{0, 192, 0, 192}}) {
    const RowSums row = CombineAll(std::vector<TileSums>(num_tiles, tile));

    EXPECT_EQ(row.sum, ToFixedPoint(tile.sum) * num_tiles);
    EXPECT_GT(row.sum, 0);
    EXPECT_LE(row.weighted, 0);
    EXPECT_NEAR(EntropyOf(row, NormalizerOf(row), 1 << 20), std::log(1 << 20), 1e-3);
  }
}

TEST(RowSumsTest, LogprobIsNeverAboveZeroAndKeepsTheOrderOfLogits) {
  const RowSums row = CombineAll(std::vector<TileSums>{{5, 0.9999999F, -0.0000001F, 1}});
  const RowNormalizer normalizer = NormalizerOf(row);
  float previous = -std::numeric_limits<float>::infinity();
  for (float z = 3.4F; z < 3.5F; z += 1e-3F) {
    const float logprob = LogprobOf(z, Log2Scale(1), normalizer);
    EXPECT_LE(logprob, 0.0F);
    EXPECT_GE(logprob, previous);
    previous = logprob;
  }
}

// The lse has a relative rounding error of 2^-24, and so has its rounded remainder.
TEST(RowSumsTest, LsePlusItsRestIsTheExactLse) {
  for (const int32_t exponent : {0, 1, -3, 100'989, -100'989, 1 << 30}) {
    for (const double log2_sum : {-1.0, 0.1234567890123, 19.9}) {
      const RowNormalizer row = {exponent, log2_sum, true};
      const double lse = kLn2 * (exponent + log2_sum);

      EXPECT_NEAR(static_cast<double>(LseOf(row)) + static_cast<double>(LseRestOf(row)), lse,
                  0x1p-48 * std::fabs(lse));
    }
  }
  EXPECT_TRUE(std::isnan(LseRestOf({kNonfiniteExponent, 0, false})));
}

TEST(TileTest, TheExponentIsTheCeilingOfTheLargestLogitInBaseTwo) {
  EXPECT_EQ(TileExponent(0.0F, 1.0F), 0);
  EXPECT_EQ(TileExponent(2.5F, 1.0F), 3);
  EXPECT_EQ(TileExponent(3.0F, 1.0F), 3);
  EXPECT_EQ(TileExponent(-2.5F, 1.0F), -2);
  EXPECT_EQ(TileExponent(1.0F, 100.0F), 100);
}

TEST(TileTest, ExponentsOutsideTheRangeAreMarked) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(TileExponent(-kInfinity, 1.0F), kEmptyExponent);
  EXPECT_EQ(TileExponent(kInfinity, 1.0F), kNonfiniteExponent);
  EXPECT_EQ(TileExponent(std::numeric_limits<float>::quiet_NaN(), 1.0F), kNonfiniteExponent);
  EXPECT_EQ(TileExponent(2e9F, 1.0F), kNonfiniteExponent);
}

TEST(TileTest, TilesCoverTheVocabulary) {
  EXPECT_EQ(NumTiles(1), 1);
  EXPECT_EQ(NumTiles(192), 1);
  EXPECT_EQ(NumTiles(193), 2);
  EXPECT_EQ(NumTiles(151'936), 792);
}

}  // namespace
}  // namespace logprobd::kernels
