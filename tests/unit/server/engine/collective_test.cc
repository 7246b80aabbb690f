#include "server/engine/collective.h"

#include <bit>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/run_ranks.h"

namespace logprobd {
namespace {

using kernels::Reduction;
using kernels::ReductionType;
using ::testing::Each;
using ::testing::ElementsAre;

/// Returns the values of every rank after an AllReduce.
template <typename T>
std::vector<std::vector<T>> ReduceAll(std::vector<std::vector<T>> ranks, ReductionType type) {
  InProcessCollective collective(static_cast<int32_t>(ranks.size()));
  testing::RunRanks(static_cast<int32_t>(ranks.size()), [&](int32_t rank) {
    std::vector<T>& values = ranks[static_cast<size_t>(rank)];
    const Reduction item = {values.data(), static_cast<int64_t>(values.size()), type};
    EXPECT_TRUE(collective.AllReduce(rank, {item}, nullptr).ok());
  });
  return ranks;
}

TEST(InProcessCollectiveTest, TakesTheLargestOfSignedAndUnsignedNumbers) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  EXPECT_THAT(
      ReduceAll<int32_t>({{kLeast, -5, 7}, {kLeast, -9, 8}, {-1, -5, 0}}, ReductionType::kMaxInt32),
      Each(ElementsAre(-1, -5, 8)));
  EXPECT_THAT(ReduceAll<uint32_t>({{0, 0x80000000U}, {0xFFFFFFFFU, 1}}, ReductionType::kMaxUint32),
              Each(ElementsAre(0xFFFFFFFFU, 0x80000000U)));
  EXPECT_THAT(ReduceAll<uint64_t>({{0, 1ULL << 63}, {5, 1}}, ReductionType::kMaxUint64),
              Each(ElementsAre(5, 1ULL << 63)));
}

TEST(InProcessCollectiveTest, AddsIntegersExactly) {
  constexpr int64_t kLarge = (int64_t{1} << 61) + 1;
  EXPECT_THAT(ReduceAll<int64_t>({{kLarge, -3}, {kLarge, 2}, {-7, 0}}, ReductionType::kSumInt64),
              Each(ElementsAre(2 * kLarge - 7, -1)));
}

TEST(InProcessCollectiveTest, KeepsTheBitsOfAFloatThatOnlyOneRankHas) {
  const float value = -0.0F;
  const auto bits = std::bit_cast<int32_t>(value);

  EXPECT_THAT(ReduceAll<int32_t>({{0}, {bits}, {0}}, ReductionType::kSumInt32),
              Each(ElementsAre(bits)));
}

TEST(InProcessCollectiveTest, ReducesSeveralArraysOfAnySizeInOneCall) {
  constexpr size_t kCount = 1'001;
  std::vector<std::vector<int32_t>> largest(5, std::vector<int32_t>(kCount));
  std::vector<std::vector<int64_t>> sums(5, std::vector<int64_t>(3));
  InProcessCollective collective(5);

  testing::RunRanks(5, [&](int32_t rank) {
    const auto i = static_cast<size_t>(rank);
    for (size_t k = 0; k < kCount; ++k) {
      largest[i][k] = static_cast<int32_t>(k % 5 == i ? 1'000 + k : k);
    }
    sums[i] = {rank, 1, -rank};
    const std::vector<Reduction> items = {
        {largest[i].data(), kCount, ReductionType::kMaxInt32},
        {sums[i].data(), 3, ReductionType::kSumInt64},
        {nullptr, 0, ReductionType::kMaxUint64},
    };
    EXPECT_TRUE(collective.AllReduce(rank, items, nullptr).ok());
  });

  EXPECT_THAT(sums, Each(ElementsAre(10, 5, -10)));
  for (const std::vector<int32_t>& rank : largest) {
    for (size_t k = 0; k < kCount; ++k) ASSERT_EQ(rank[k], static_cast<int32_t>(1'000 + k));
  }
}

TEST(InProcessCollectiveTest, GathersToTheFirstRank) {
  std::vector<std::vector<uint64_t>> mine = {{1, 2}, {3, 4}, {5, 6}};
  std::vector<uint64_t> all(6);
  InProcessCollective collective(3);

  testing::RunRanks(3, [&](int32_t rank) {
    EXPECT_TRUE(collective
                    .Gather(rank, mine[static_cast<size_t>(rank)].data(), 2,
                            rank == 0 ? all.data() : nullptr, nullptr)
                    .ok());
  });

  EXPECT_THAT(all, ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST(InProcessCollectiveTest, AbortReleasesWaitingRanksAndRefusesLaterCalls) {
  InProcessCollective collective(2);
  int32_t value = 1;
  const Reduction item = {&value, 1, ReductionType::kMaxInt32};
  absl::Status waited;
  std::thread waiting([&] { waited = collective.AllReduce(0, {item}, nullptr); });

  collective.Abort();
  waiting.join();

  EXPECT_TRUE(absl::IsAborted(waited)) << waited;
  EXPECT_TRUE(absl::IsAborted(collective.AllReduce(1, {item}, nullptr)));
}

}  // namespace
}  // namespace logprobd
