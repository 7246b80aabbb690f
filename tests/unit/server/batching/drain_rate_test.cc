#include "server/batching/drain_rate.h"

#include "gtest/gtest.h"

namespace logprobd {
namespace {

constexpr absl::Time kBegin = absl::UnixEpoch();

TEST(DrainRateTest, KnowsNothingAtFirst) {
  const DrainRate rate(100);

  EXPECT_FALSE(rate.rows_per_second().has_value());
  EXPECT_FALSE(rate.TimeFor(10).has_value());
  EXPECT_EQ(rate.RetryAfter(10), DrainRate::kRetryAfterUnmeasured);
}

TEST(DrainRateTest, MeasuresRowsASecond) {
  DrainRate rate(100);

  rate.AddBatch(200, kBegin, kBegin + absl::Milliseconds(100));

  EXPECT_DOUBLE_EQ(rate.rows_per_second().value_or(0), 2'000);
  EXPECT_EQ(rate.TimeFor(1'000), absl::Milliseconds(500));
}

TEST(DrainRateTest, CountsTheTimeOfOverlappingBatchesOnce) {
  DrainRate rate(100);

  rate.AddBatch(100, kBegin, kBegin + absl::Seconds(1));
  rate.AddBatch(100, kBegin + absl::Milliseconds(1), kBegin + absl::Seconds(2));

  EXPECT_DOUBLE_EQ(rate.rows_per_second().value_or(0), 100);
}

TEST(DrainRateTest, PassesOverBatchesTooSmallToTell) {
  DrainRate rate(100);

  rate.AddBatch(99, kBegin, kBegin + absl::Seconds(10));

  EXPECT_FALSE(rate.rows_per_second().has_value());
}

TEST(DrainRateTest, KeepsHintsBetweenAMillisecondAndTenSeconds) {
  DrainRate rate(1);
  rate.AddBatch(100, kBegin, kBegin + absl::Seconds(1));

  EXPECT_EQ(rate.RetryAfter(0.001), absl::Milliseconds(1));
  EXPECT_EQ(rate.RetryAfter(1e9), absl::Seconds(10));
}

}  // namespace
}  // namespace logprobd
