#include <algorithm>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/combine_tiles.h"

namespace logprobd::kernels {
namespace {

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

TEST(TopRowsTest, TheLowestIdWinsTiesWhicheverTileCameFirst) {
  TopRows top(1, 8);
  top.Reset(1, 3);
  Offer(top, 0, {7, 7}, 100);
  Offer(top, 0, {7, 7}, 0);
  Offer(top, 0, {7, 7}, 50);

  EXPECT_EQ(Ids(top, 0), (std::vector<int32_t>{0, 1, 50}));
}

TEST(TopRowsTest, NegativeInfinityTakesAPlaceButNanDoesNot) {
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
    logits[i] = static_cast<float>((i * 7919) % 1009);  // with ties
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
