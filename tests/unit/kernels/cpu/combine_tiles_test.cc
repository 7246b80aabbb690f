#include "kernels/cpu/combine_tiles.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

/// Makes plausible sums [num_tiles, num_rows]; some tiles are empty, far below others or not
/// finite.
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

TEST(CombineTilesTest, TilesFarBelowTheLargestAddNothing) {
  for (const int32_t below : {100, 1'022, 1'023, 5'000, 2'000'000'000}) {
    const std::vector<TileSums> tiles = {{900'000'000, 3, -1, 2}, {900'000'000 - below, 5, -2, 4}};
    RowSums rows[1] = {{7, 7, 7, 7}};

    CombineTiles(tiles.data(), 2, 1, 1, rows);

    RowSums expected;
    expected.exponent = 900'000'000;
    AddTile(expected, tiles[0]);
    EXPECT_EQ(rows[0].exponent, expected.exponent) << below;
    EXPECT_EQ(rows[0].sum, expected.sum) << below;
    EXPECT_EQ(rows[0].weighted, expected.weighted) << below;
    EXPECT_EQ(rows[0].sum_squares, expected.sum_squares) << below;
  }
}

TEST(CombineTilesTest, ARowOfEmptyTilesIsEmpty) {
  const std::vector<TileSums> tiles(3, {kEmptyExponent, 0, 0, 0});
  RowSums rows[1] = {{7, 7, 7, 7}};

  CombineTiles(tiles.data(), 3, 1, 1, rows);

  EXPECT_EQ(rows[0].exponent, kEmptyExponent);
  EXPECT_EQ(rows[0].sum, 0);
}

std::vector<int32_t> Ids(const TopRows& top, int64_t row) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < top.count(row); ++i) ids.push_back(top.entries(row)[i].id);
  return ids;
}

void Offer(TopRows& top, int64_t row, const std::vector<float>& logits, int32_t first_column) {
  top.Offer(row, logits.data(), *std::max_element(logits.begin(), logits.end()), first_column,
            static_cast<int32_t>(logits.size()));
}

TEST(TopRowsTest, KeepsTheBestInOrder) {
  TopRows top(2, 8);
  top.Reset(2, 3);

  Offer(top, 1, {1, 5, 3}, 0);
  Offer(top, 1, {4, 0, 6}, 10);

  EXPECT_EQ(Ids(top, 1), (std::vector<int32_t>{12, 1, 10}));
  EXPECT_EQ(top.count(0), 0);
}

TEST(TopRowsTest, KeepsEveryLogitWhileThereIsRoom) {
  TopRows top(1, 8);
  top.Reset(1, 4);

  Offer(top, 0, {5, 4, 3}, 0);
  Offer(top, 0, {2}, 10);
  EXPECT_EQ(Ids(top, 0), (std::vector<int32_t>{0, 1, 2, 10}));

  Offer(top, 0, {1, 2}, 5);  // the list is full, and the lower id wins the tie
  EXPECT_EQ(Ids(top, 0), (std::vector<int32_t>{0, 1, 2, 6}));
}

TEST(TopRowsTest, AFullRowLeavesItsNeighboursAlone) {
  TopRows top(3, 2);
  top.Reset(3, 2);
  for (const int64_t row : {0, 2}) Offer(top, row, {1, 2}, 100);

  for (int32_t first = 90; first >= 0; first -= 10) Offer(top, 1, {7, 8, 9}, first);

  EXPECT_EQ(Ids(top, 0), (std::vector<int32_t>{101, 100}));
  EXPECT_EQ(Ids(top, 1), (std::vector<int32_t>{2, 12}));
  EXPECT_EQ(Ids(top, 2), (std::vector<int32_t>{101, 100}));
}

TEST(TopRowsTest, TheLowestIdWinsTiesInAnyOrderOfTiles) {
  TopRows top(1, 8);
  top.Reset(1, 3);
  Offer(top, 0, {7, 7}, 100);
  Offer(top, 0, {7, 7}, 0);
  Offer(top, 0, {7, 7}, 50);

  EXPECT_EQ(Ids(top, 0), (std::vector<int32_t>{0, 1, 50}));
}

TEST(TopRowsTest, NegativeInfinityIsListedButNanIsNot) {
  TopRows top(1, 8);
  top.Reset(1, 4);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();

  Offer(top, 0, {-kInfinity, std::numeric_limits<float>::quiet_NaN(), 1, -kInfinity}, 0);

  EXPECT_EQ(Ids(top, 0), (std::vector<int32_t>{2, 0, 3}));
}

TEST(TopRowsTest, ResetEmptiesTheRows) {
  TopRows top(1, 8);
  top.Reset(1, 2);
  Offer(top, 0, {9, 9, 9}, 0);

  top.Reset(1, 2);
  Offer(top, 0, {1, 2, 3}, 0);

  EXPECT_EQ(Ids(top, 0), (std::vector<int32_t>{2, 1}));
}

TEST(TopRowsTest, ThreadsMayOfferTilesOfOneRow) {
  TopRows top(1, 16);
  std::vector<float> logits(4000);
  for (size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>((i * 7919) % 1009);  // some logits are equal
  }
  for (int round = 0; round < 20; ++round) {
    top.Reset(1, 16);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (size_t begin = t * 100; begin < logits.size(); begin += 400) {
          Offer(top, 0,
                {logits.begin() + static_cast<int64_t>(begin),
                 logits.begin() + static_cast<int64_t>(begin) + 100},
                static_cast<int32_t>(begin));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();

    std::vector<int32_t> ids(logits.size());
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    ids.resize(16);
    ASSERT_EQ(Ids(top, 0), ids);
  }
}

}  // namespace
}  // namespace logprobd::kernels
