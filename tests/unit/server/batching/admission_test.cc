#include "server/batching/admission.h"

#include "gtest/gtest.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

TEST(AdmissionTest, CountsInStepsWhatIsReleased) {
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

TEST(AdmissionTest, CountsNothingOfWhatItRefuses) {
  Admission admission({.total = {.rows = 10, .bytes = 100, .requests = 10}, .client_share = 1});
  const DrainRate rate(1);

  const auto refusal =
      admission.Admit("a", Priority::kLow, {.rows = 1, .bytes = 101, .requests = 1}, rate);

  EXPECT_EQ(RejectionOf(refusal), Rejection::kQueueBytes);
  EXPECT_EQ(admission.total().rows, 0);
}

TEST(AdmissionTest, NewLimitsHoldFromThenOnAndLeaveWhatIsThere) {
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

TEST(AdmissionTest, LetsAClientHoldAtLeastOneRowAndRequest) {
  Admission admission({.total = {.rows = 2, .bytes = 100, .requests = 1}, .client_share = 0.1});

  EXPECT_TRUE(admission.CheckPossible({.rows = 1, .bytes = 10, .requests = 1}).ok());
  EXPECT_FALSE(admission.CheckPossible({.rows = 2, .bytes = 10, .requests = 1}).ok());
}

TEST(AdmissionTest, HintsWithoutAMeasurementToo) {
  Admission admission({.total = {.rows = 2, .bytes = 100, .requests = 1}, .client_share = 1});

  const auto refusal =
      admission.Admit("a", Priority::kHigh, {.rows = 3, .bytes = 1, .requests = 1}, DrainRate(1));

  EXPECT_EQ(RetryAfter(refusal), DrainRate::kRetryAfterUnmeasured);
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
