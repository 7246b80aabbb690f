#include "client/cli/bench/latency_histogram.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "client/cli/bench/random.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

// A bucket's width relative to its values.
constexpr double kResolution = 1.0 / 128;

TEST(LatencyHistogramTest, OfNothingEverythingIsZero) {
  const LatencyHistogram histogram;

  EXPECT_EQ(histogram.count(), 0);
  EXPECT_EQ(histogram.mean(), 0);
  EXPECT_EQ(histogram.max(), 0);
  EXPECT_EQ(histogram.Percentile(50), 0);
}

TEST(LatencyHistogramTest, OfOneValueEveryPercentileIsThatValue) {
  LatencyHistogram histogram;

  histogram.Record(0.25);

  EXPECT_EQ(histogram.mean(), 0.25);
  EXPECT_EQ(histogram.min(), 0.25);
  EXPECT_EQ(histogram.Percentile(0), 0.25);
  EXPECT_EQ(histogram.Percentile(99.9), 0.25);
}

TEST(LatencyHistogramTest, PercentilesAreThoseOfTheNearestRankWithinItsResolution) {
  Random random(7);
  LatencyHistogram histogram;
  std::vector<double> values;
  for (int i = 0; i < 20'000; ++i) {
    values.push_back(1e-4 * std::exp(3 * static_cast<double>(random.Normal())));
    histogram.Record(values.back());
  }
  std::sort(values.begin(), values.end());

  for (const double percent : {1.0, 10.0, 50.0, 90.0, 99.0, 99.9}) {
    const auto rank = static_cast<size_t>(std::ceil(percent / 100 * 20'000)) - 1;
    EXPECT_GE(histogram.Percentile(percent), values[rank] - 1e-9) << percent;
    EXPECT_LE(histogram.Percentile(percent), values[rank] * (1 + kResolution) + 1e-9) << percent;
  }
  EXPECT_EQ(histogram.Percentile(100), values.back());
}

TEST(LatencyHistogramTest, IsExactBelowAQuarterOfAMicrosecond) {
  LatencyHistogram histogram;
  for (int i = 1; i <= 200; ++i) histogram.Record(i * 1e-9);

  // The upper end of the bucket of 100 ns.
  EXPECT_DOUBLE_EQ(histogram.Percentile(50), 101e-9);
}

TEST(LatencyHistogramTest, CountsWhatIsBeyondItsRange) {
  LatencyHistogram histogram;

  histogram.Record(-1);
  histogram.Record(1e6);

  EXPECT_EQ(histogram.count(), 2);
  EXPECT_EQ(histogram.min(), 0);
  EXPECT_EQ(histogram.max(), 1e6);
}

TEST(LatencyHistogramTest, MergesAsIfAllHadBeenRecordedInOne) {
  LatencyHistogram one;
  LatencyHistogram other;
  LatencyHistogram all;
  for (int i = 1; i < 1'000; ++i) {
    (i % 3 == 0 ? one : other).Record(i * 1e-5);
    all.Record(i * 1e-5);
  }

  one.Merge(other);
  one.Merge({});

  EXPECT_EQ(one.count(), all.count());
  EXPECT_EQ(one.min(), all.min());
  EXPECT_EQ(one.max(), all.max());
  EXPECT_NEAR(one.mean(), all.mean(), 1e-12);
  for (const double percent : {1.0, 50.0, 99.0}) {
    EXPECT_EQ(one.Percentile(percent), all.Percentile(percent));
  }
}

TEST(LatencyHistogramTest, ShowsEveryValueInABucketAroundIt) {
  LatencyHistogram histogram;
  const std::vector<double> values = {3e-9, 255e-9, 256e-9, 1e-6, 0.0123, 7.5};
  for (const double value : values) histogram.Record(value);

  size_t at = 0;
  histogram.ForEachBucket([&](double begin, double end, int64_t count) {
    ASSERT_LT(at, values.size());
    EXPECT_LE(begin, values[at] * (1 + 1e-12));
    EXPECT_GT(end, values[at]);
    EXPECT_LE(end - begin, std::max(1.001e-9, values[at] * kResolution));
    EXPECT_EQ(count, 1);
    ++at;
  });

  EXPECT_EQ(at, values.size());
}

}  // namespace
}  // namespace logprobd::client
