#include "server/batching/drain_rate.h"

#include "gtest/gtest.h"

namespace logprobd {
namespace {

constexpr absl::Time kBegin = absl::UnixEpoch();

TEST(DrainRateTest, KnowsNothingAtFirst) {
  const DrainRate rate(100);

  EXPECT_FALSE(rate.TimeFor(10).has_value());
  EXPECT_FALSE(rate.LeastTimeFor(10, kBegin).has_value());
  EXPECT_EQ(rate.RetryAfter(10), DrainRate::kRetryAfterUnmeasured);
}

TEST(DrainRateTest, MeasuresRowsASecond) {
  DrainRate rate(100);

  rate.AddBatch(200, kBegin, kBegin + absl::Milliseconds(100));

  EXPECT_EQ(rate.TimeFor(1'000), absl::Milliseconds(500));
}

TEST(DrainRateTest, CountsTheTimeOfOverlappingBatchesOnce) {
  DrainRate rate(100);

  rate.AddBatch(100, kBegin, kBegin + absl::Seconds(1));
  rate.AddBatch(100, kBegin + absl::Milliseconds(1), kBegin + absl::Seconds(2));

  EXPECT_EQ(rate.TimeFor(100), absl::Seconds(1));
}

TEST(DrainRateTest, SharesRowsAmongTheReplicas) {
  DrainRate rate(100);
  rate.AddBatch(100, kBegin, kBegin + absl::Seconds(1));

  rate.set_num_replicas(4);

  EXPECT_EQ(rate.TimeFor(400), absl::Seconds(1));
  EXPECT_EQ(rate.LeastTimeFor(400, kBegin + absl::Seconds(1)), absl::Seconds(1));
}

TEST(DrainRateTest, MeasuresReplicasByThemselvesWhoseBatchesEndTogether) {
  DrainRate rate(100);
  rate.set_num_replicas(2);
  const absl::Time end = kBegin + absl::Seconds(1);

  rate.AddBatch(100, kBegin, end, 0);
  rate.AddBatch(100, kBegin, end + absl::Microseconds(1), 1);

  EXPECT_NEAR(absl::ToDoubleSeconds(*rate.TimeFor(200)), 1, 1e-5);
  EXPECT_EQ(rate.LeastTimeFor(200, end), absl::Seconds(1));
}

TEST(DrainRateTest, PassesOverBatchesTooSmallToTell) {
  DrainRate rate(100);

  rate.AddBatch(99, kBegin, kBegin + absl::Seconds(10));

  EXPECT_FALSE(rate.TimeFor(1).has_value());
  EXPECT_FALSE(rate.LeastTimeFor(1, kBegin + absl::Seconds(10)).has_value());
}

TEST(DrainRateTest, TakesTheBestRateOfLateAsTheLeastTime) {
  DrainRate rate(100);
  absl::Time now = kBegin;
  const auto add = [&](int64_t rows, absl::Duration taken) {
    rate.AddBatch(rows, now, now + taken);
    now += taken;
  };

  add(100, absl::Seconds(1));
  add(100, absl::Seconds(3));  // a stall
  EXPECT_EQ(rate.LeastTimeFor(100, now), absl::Seconds(1));
  add(10, absl::Milliseconds(10));  // small, but faster
  EXPECT_EQ(rate.LeastTimeFor(100, now), absl::Milliseconds(100));
}

TEST(DrainRateTest, ForgetsOldRates) {
  DrainRate rate(100);
  rate.AddBatch(100, kBegin, kBegin + absl::Seconds(3));
  const absl::Time measured = kBegin + absl::Seconds(3);

  EXPECT_TRUE(rate.LeastTimeFor(1, measured + DrainRate::kMemory).has_value());
  EXPECT_FALSE(rate.LeastTimeFor(1, measured + 2 * DrainRate::kMemory).has_value());
}

TEST(DrainRateTest, KeepsHintsBetweenAMillisecondAndTenSeconds) {
  DrainRate rate(1);
  rate.AddBatch(100, kBegin, kBegin + absl::Seconds(1));

  EXPECT_EQ(rate.RetryAfter(0.001), absl::Milliseconds(1));
  EXPECT_EQ(rate.RetryAfter(1e9), absl::Seconds(10));
}

}  // namespace
}  // namespace logprobd
