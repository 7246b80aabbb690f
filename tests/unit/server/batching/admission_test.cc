#include "server/batching/admission.h"

#include <malloc.h>

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

constexpr absl::Time kBegin = absl::UnixEpoch();

TEST(DrainRateTest, HasNoEstimateAtFirst) {
  const DrainRate rate(100);

  EXPECT_FALSE(rate.TimeFor(10).has_value());
  EXPECT_FALSE(rate.LeastTimeFor(10, kBegin).has_value());
  EXPECT_EQ(rate.RetryAfter(10), DrainRate::kRetryAfterUnmeasured);
}

TEST(DrainRateTest, MeasuresRowsPerSecond) {
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

TEST(DrainRateTest, MeasuresReplicasSeparatelyWhenTheirBatchesEndTogether) {
  DrainRate rate(100);
  rate.set_num_replicas(2);
  const absl::Time end = kBegin + absl::Seconds(1);

  rate.AddBatch(100, kBegin, end, 0);
  rate.AddBatch(100, kBegin, end + absl::Microseconds(1), 1);

  EXPECT_NEAR(absl::ToDoubleSeconds(*rate.TimeFor(200)), 1, 1e-5);
  EXPECT_EQ(rate.LeastTimeFor(200, end), absl::Seconds(1));
}

TEST(DrainRateTest, IgnoresBatchesThatAreTooSmall) {
  DrainRate rate(100);

  rate.AddBatch(99, kBegin, kBegin + absl::Seconds(10));

  EXPECT_FALSE(rate.TimeFor(1).has_value());
  EXPECT_FALSE(rate.LeastTimeFor(1, kBegin + absl::Seconds(10)).has_value());
}

TEST(DrainRateTest, EstimatesTheLeastTimeFromTheBestRecentRate) {
  DrainRate rate(100);
  absl::Time now = kBegin;
  const auto add = [&](int64_t rows, absl::Duration taken) {
    rate.AddBatch(rows, now, now + taken);
    now += taken;
  };

  add(100, absl::Seconds(1));
  add(100, absl::Seconds(3));  // A stall.
  EXPECT_EQ(rate.LeastTimeFor(100, now), absl::Seconds(1));
  add(10, absl::Milliseconds(10));  // A small but faster batch.
  EXPECT_EQ(rate.LeastTimeFor(100, now), absl::Milliseconds(100));
}

TEST(DrainRateTest, ForgetsOldRates) {
  DrainRate rate(100);
  rate.AddBatch(100, kBegin, kBegin + absl::Seconds(3));
  const absl::Time measured = kBegin + absl::Seconds(3);

  EXPECT_TRUE(rate.LeastTimeFor(1, measured + DrainRate::kMemory).has_value());
  EXPECT_FALSE(rate.LeastTimeFor(1, measured + 2 * DrainRate::kMemory).has_value());
}

TEST(DrainRateTest, AnAncientRateDoesNotReturnWithTheNextMeasurement) {
  for (const int64_t periods : {1, 2, 3, 1'000}) {
    DrainRate rate(100);
    rate.AddBatch(100, kBegin, kBegin + absl::Seconds(1));
    const absl::Time later = kBegin + absl::Seconds(1) + periods * DrainRate::kMemory;

    rate.AddBatch(100, later - absl::Seconds(3), later);

    EXPECT_EQ(rate.LeastTimeFor(100, later), absl::Seconds(periods < 2 ? 1 : 3)) << periods;
  }
}

TEST(DrainRateTest, KeepsHintsBetweenAMillisecondAndTenSeconds) {
  DrainRate rate(1);
  rate.AddBatch(100, kBegin, kBegin + absl::Seconds(1));

  EXPECT_EQ(rate.RetryAfter(0.001), absl::Milliseconds(1));
  EXPECT_EQ(rate.RetryAfter(1e9), absl::Seconds(10));
}

}  // namespace

namespace {

TEST(AdmissionTest, ReleasesWhatItChargedInSteps) {
  Admission admission({.total = {.rows = 10, .bytes = 100, .requests = 10}});
  const DrainRate rate(1);
  ASSERT_TRUE(
      admission.Admit("a", Priority::kLow, {.rows = 3, .bytes = 9, .requests = 1}, rate).ok());
  EXPECT_EQ(admission.of(Priority::kLow).bytes, 9);

  admission.Release("a", Priority::kLow, {.rows = 3});
  admission.Release("a", Priority::kLow, {.bytes = 9, .requests = 1});

  EXPECT_EQ(admission.total().rows, 0);
  EXPECT_EQ(admission.total().bytes, 0);
  EXPECT_EQ(admission.total().requests, 0);
  EXPECT_EQ(admission.of(Priority::kLow).requests, 0);
}

TEST(AdmissionTest, ChargesNothingForARefusedRequest) {
  Admission admission({.total = {.rows = 10, .bytes = 100, .requests = 10}, .client_share = 1});
  const DrainRate rate(1);

  const auto refusal =
      admission.Admit("a", Priority::kLow, {.rows = 1, .bytes = 101, .requests = 1}, rate);

  EXPECT_EQ(RejectionOf(refusal), Rejection::kQueueBytes);
  EXPECT_EQ(admission.total().rows, 0);
}

TEST(AdmissionTest, AClientMayHoldExactlyItsShareOfEachLimit) {
  const DrainRate rate(1);
  const QueueLoad share = {.rows = 5, .bytes = 50, .requests = 5};
  for (const QueueLoad& more :
       {QueueLoad{.rows = 1}, QueueLoad{.bytes = 1}, QueueLoad{.requests = 1}}) {
    Admission admission({.total = {.rows = 10, .bytes = 100, .requests = 10}, .client_share = 0.5});
    ASSERT_TRUE(admission.Admit("a", Priority::kLow, share, rate).ok());

    EXPECT_EQ(RejectionOf(admission.Admit("a", Priority::kLow, more, rate)),
              Rejection::kClientShare);
    ASSERT_TRUE(admission.Admit("b", Priority::kLow, share, rate).ok());
    EXPECT_FALSE(admission.Admit("c", Priority::kLow, more, rate).ok());
  }
}

TEST(AdmissionTest, ARefusalNamesWhatIsHeldWhatIsAskedForAndTheLimit) {
  const DrainRate rate(1);
  Admission admission({.total = {.rows = 40, .bytes = 400, .requests = 20}, .client_share = 0.5});
  ASSERT_TRUE(
      admission.Admit("a", Priority::kLow, {.rows = 12, .bytes = 130, .requests = 7}, rate).ok());
  const auto refusal = [&](const QueueLoad& more) {
    return std::string(admission.Admit("a", Priority::kLow, more, rate).message());
  };

  EXPECT_EQ(refusal({.rows = 30}),
            "queue rows: 12 are waiting, and 30 more would exceed the limit of 40");
  EXPECT_EQ(refusal({.bytes = 300}),
            "queue bytes: 130 are waiting, and 300 more would exceed the limit of 400");
  EXPECT_EQ(refusal({.requests = 14}),
            "queue requests: 7 are waiting, and 14 more would exceed the limit of 20");
  EXPECT_EQ(refusal({.rows = 9}),
            "this client's queue rows: 12 are waiting, and 9 more would exceed the limit of 20");
  EXPECT_EQ(
      refusal({.bytes = 90}),
      "this client's queue bytes: 130 are waiting, and 90 more would exceed the limit of 200");
  EXPECT_EQ(refusal({.requests = 4}),
            "this client's queue requests: 7 are waiting, and 4 more would exceed the limit of 10");
}

TEST(AdmissionTest, KeepsNoMemoryOfClientsThatHoldNothing) {
  Admission admission({.total = {.rows = 10, .bytes = 100, .requests = 10}, .client_share = 1});
  const DrainRate rate(1);
  const QueueLoad load = {.rows = 1, .bytes = 1, .requests = 1};
  const size_t before = mallinfo2().uordblks;

  for (int client = 0; client < 20'000; ++client) {
    const std::string id = absl::StrCat("a client with a name of its own, number ", client);
    ASSERT_TRUE(admission.Admit(id, Priority::kLow, load, rate).ok());
    admission.Release(id, Priority::kLow, load);
  }

  EXPECT_LT(mallinfo2().uordblks, before + (size_t{64} << 10));
}

TEST(AdmissionTest, AppliesNewLimitsAndKeepsAdmittedRequests) {
  Admission admission({.total = {.rows = 10, .bytes = 100, .requests = 10}, .client_share = 1});
  const DrainRate rate(1);
  ASSERT_TRUE(
      admission.Admit("a", Priority::kLow, {.rows = 8, .bytes = 9, .requests = 1}, rate).ok());

  admission.SetLimits({.total = {.rows = 4, .bytes = 100, .requests = 10}, .client_share = 0.5});

  EXPECT_FALSE(admission.CheckPossible({.rows = 3}).ok());
  EXPECT_EQ(RejectionOf(admission.Admit("b", Priority::kLow, {.rows = 1}, rate)),
            Rejection::kQueueRows);
  EXPECT_EQ(admission.total().rows, 8);
  admission.Release("a", Priority::kLow, {.rows = 8});
  EXPECT_TRUE(admission.Admit("b", Priority::kLow, {.rows = 2}, rate).ok());
}

TEST(AdmissionTest, AClientCanHaveAShareOfItsOwn) {
  Admission admission({.total = {.rows = 10, .bytes = 100, .requests = 10}, .client_share = 0.5});
  const DrainRate rate(1);
  const auto admit = [&](int64_t rows, double share) {
    return admission.Admit("a", Priority::kLow, {.rows = rows}, rate, share).ok();
  };

  EXPECT_TRUE(admission.CheckPossible({.rows = 2}, 0.2).ok());
  EXPECT_FALSE(admission.CheckPossible({.rows = 3}, 0.2).ok());
  EXPECT_TRUE(admission.CheckPossible({.rows = 10}, 1).ok());
  EXPECT_TRUE(admit(2, 0.2));
  EXPECT_FALSE(admit(1, 0.2));
  EXPECT_TRUE(admit(3, 0));  // the share of all clients
  EXPECT_FALSE(admit(1, 0));
}

TEST(AdmissionTest, LetsAClientHoldAtLeastOneRowAndRequest) {
  Admission admission({.total = {.rows = 2, .bytes = 100, .requests = 1}, .client_share = 0.1});

  EXPECT_TRUE(admission.CheckPossible({.rows = 1, .bytes = 10, .requests = 1}).ok());
  EXPECT_FALSE(admission.CheckPossible({.rows = 2, .bytes = 10, .requests = 1}).ok());
}

TEST(AdmissionTest, GivesARetryHintWithoutAMeasurement) {
  Admission admission({.total = {.rows = 2, .bytes = 100, .requests = 1}, .client_share = 1});

  const auto refusal =
      admission.Admit("a", Priority::kHigh, {.rows = 3, .bytes = 1, .requests = 1}, DrainRate(1));

  EXPECT_EQ(RetryAfter(refusal), DrainRate::kRetryAfterUnmeasured);
}

TEST(AdmissionTest, GivesAHintForTheRowsThatAreTooManyAlsoIfNoneWait) {
  Admission admission({.total = {.rows = 2, .bytes = 100, .requests = 1}, .client_share = 1});
  DrainRate rate(1);
  rate.AddBatch(100, kBegin, kBegin + absl::Seconds(1));

  const auto rows = admission.Admit("a", Priority::kHigh, {.rows = 5}, rate);
  const auto bytes = admission.Admit("a", Priority::kHigh, {.bytes = 101}, rate);

  EXPECT_EQ(RetryAfter(rows), absl::Milliseconds(30));  // 3 rows
  EXPECT_EQ(RetryAfter(bytes), DrainRate::kRetryAfterUnmeasured);
}

TEST(AdmissionTest, ConvertsBytesAndRequestsToTheRowsThatCarryThem) {
  Admission admission(
      {.total = {.rows = 1'000, .bytes = 8'000, .requests = 10}, .client_share = 1});
  DrainRate rate(1);
  const absl::Time begin = absl::UnixEpoch();
  rate.AddBatch(100, begin, begin + absl::Seconds(1));
  ASSERT_TRUE(
      admission.Admit("a", Priority::kHigh, {.rows = 1'000, .bytes = 8'000, .requests = 10}, rate)
          .ok());
  admission.Release("a", Priority::kHigh, {.rows = 0});

  const auto bytes = admission.Admit("a", Priority::kHigh, {.bytes = 800}, rate);
  const auto requests = admission.Admit("a", Priority::kHigh, {.requests = 1}, rate);

  EXPECT_EQ(RetryAfter(bytes), absl::Seconds(1));     // 100 rows
  EXPECT_EQ(RetryAfter(requests), absl::Seconds(1));  // 100 rows
}

}  // namespace

}  // namespace logprobd
