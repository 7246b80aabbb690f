#include "client/cpp/retry_policy.h"

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

constexpr double kHalf = 0.5;
const RetryPolicy kPolicy = {.retries = 3,
                             .backoff_initial = absl::Milliseconds(100),
                             .backoff_max = absl::Milliseconds(300)};

TEST(RetryPolicyTest, DoublesTheRangeOfTheRandomDelayUpToItsBound) {
  const absl::Status full = absl::ResourceExhaustedError("full");

  EXPECT_EQ(kPolicy.NextDelay({.attempts = 1, .status = full}, kHalf), absl::Milliseconds(50));
  EXPECT_EQ(kPolicy.NextDelay({.attempts = 2, .status = full}, kHalf), absl::Milliseconds(100));
  EXPECT_EQ(kPolicy.NextDelay({.attempts = 3, .status = full}, kHalf), absl::Milliseconds(150));
  EXPECT_EQ(kPolicy.NextDelay({.attempts = 1, .status = full}, 0.0), absl::ZeroDuration());
}

TEST(RetryPolicyTest, GivesUpAfterItsRetries) {
  EXPECT_FALSE(kPolicy.NextDelay({.attempts = 4, .status = absl::UnavailableError("gone")}, kHalf));
}

TEST(RetryPolicyTest, RetriesOnlyWhatMayPass) {
  EXPECT_TRUE(kPolicy.NextDelay({.status = absl::UnavailableError("gone")}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay({.status = absl::InvalidArgumentError("bad")}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay({.status = absl::DeadlineExceededError("late")}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay({.status = absl::InternalError("bug")}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay(
      {.status = absl::ResourceExhaustedError("Received message larger than max (9 vs. 4)")},
      kHalf));
}

TEST(RetryPolicyTest, LeavesRefusalsOfASliceToAnotherWay) {
  EXPECT_FALSE(kPolicy.NextDelay(
      {.status = absl::ResourceExhaustedError("cuda_ipc: 64 mappings are open")}, kHalf));
}

TEST(RetryPolicyTest, NeverReturnsBeforeTheServersHint) {
  const absl::Status full = absl::ResourceExhaustedError("full");

  EXPECT_EQ(kPolicy.NextDelay({.status = full, .pushback = "2000"}, 0.0), absl::Seconds(2));
  EXPECT_EQ(kPolicy.NextDelay({.status = full, .pushback = "2000"}, kHalf),
            absl::Milliseconds(2050));
}

TEST(RetryPolicyTest, TakesANegativeOrMalformedHintAsNo) {
  const absl::Status full = absl::ResourceExhaustedError("full");

  EXPECT_FALSE(kPolicy.NextDelay({.status = full, .pushback = "-1"}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay({.status = full, .pushback = "soon"}, kHalf));
}

TEST(RetryPolicyTest, PlansNothingPastTheDeadline) {
  EXPECT_FALSE(kPolicy.NextDelay({.status = absl::UnavailableError("gone"),
                                  .pushback = "500",
                                  .remaining = absl::Milliseconds(500)},
                                 kHalf));
}

TEST(RetryPolicyTest, StaysFiniteAfterManyAttempts) {
  const RetryPolicy patient = {.retries = 10'000, .backoff_max = absl::Seconds(5)};

  EXPECT_EQ(patient.NextDelay({.attempts = 9'999, .status = absl::UnavailableError("gone")}, kHalf),
            absl::Milliseconds(2500));
}

}  // namespace
}  // namespace logprobd::client
