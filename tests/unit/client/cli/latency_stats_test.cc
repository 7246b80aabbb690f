#include "client/cli/latency_stats.h"

#include <vector>

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

TEST(LatencyStatsTest, TakesPercentilesByNearestRank) {
  std::vector<double> sorted;
  for (int i = 1; i <= 100; ++i) sorted.push_back(i);

  EXPECT_EQ(Percentile(sorted, 50), 50);
  EXPECT_EQ(Percentile(sorted, 99), 99);
  EXPECT_EQ(Percentile(sorted, 99.5), 100);
  EXPECT_EQ(Percentile(sorted, 0), 1);
  EXPECT_EQ(Percentile(sorted, 100), 100);
}

TEST(LatencyStatsTest, OfOneValueEverythingIsThatValue) {
  const LatencyStats stats = SummarizeLatencies({0.25});

  EXPECT_EQ(stats.mean, 0.25);
  EXPECT_EQ(stats.p50, 0.25);
  EXPECT_EQ(stats.p99, 0.25);
  EXPECT_EQ(stats.max, 0.25);
}

TEST(LatencyStatsTest, SortsItsValues) {
  const LatencyStats stats = SummarizeLatencies({4, 1, 3, 2});

  EXPECT_EQ(stats.mean, 2.5);
  EXPECT_EQ(stats.p50, 2);
  EXPECT_EQ(stats.p90, 4);
  EXPECT_EQ(stats.max, 4);
}

TEST(LatencyStatsTest, OfNothingEverythingIsZero) {
  EXPECT_EQ(SummarizeLatencies({}).max, 0);
  EXPECT_EQ(Percentile({}, 50), 0);
}

}  // namespace
}  // namespace logprobd::client
