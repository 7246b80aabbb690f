#include "server/base/errors.h"

#include "gtest/gtest.h"

namespace logprobd {
namespace {

TEST(CheckTest, DoesNotEvaluateTheValuesOfATrueCondition) {
  int evaluated = 0;

  LOGPROBD_CHECK(evaluated == 0, ++evaluated);

  EXPECT_EQ(evaluated, 0);
}

TEST(CheckDeathTest, AbortsWithExpressionAndValues) {
  const int rows = 3;

  EXPECT_DEATH(LOGPROBD_CHECK(rows > 5, "rows=", rows),
               "errors_test.cc:[0-9]+: broken invariant: rows > 5: rows=3");
  EXPECT_DEATH(LOGPROBD_CHECK(rows > 5), "broken invariant: rows > 5\n");
}

TEST(ErrorsTest, CarriesWhenToRetry) {
  const absl::Status status =
      WithRetryAfter(absl::ResourceExhaustedError("full"), absl::Milliseconds(20));

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "full");
  EXPECT_EQ(RetryAfter(status), absl::Milliseconds(20));
}

TEST(ErrorsTest, RoundsTheHintUpToWholeMilliseconds) {
  const auto hint = [](absl::Duration duration) {
    return RetryAfter(WithRetryAfter(absl::UnavailableError("later"), duration));
  };

  EXPECT_EQ(hint(absl::Microseconds(1)), absl::Milliseconds(1));
  EXPECT_EQ(hint(absl::Microseconds(1'001)), absl::Milliseconds(2));
}

TEST(ErrorsTest, HasNoHintUnlessGiven) {
  EXPECT_FALSE(RetryAfter(absl::ResourceExhaustedError("full")).has_value());
  EXPECT_FALSE(RetryAfter(absl::OkStatus()).has_value());
}

TEST(ErrorsTest, PutsContextBeforeTheMessageAndKeepsTheHint) {
  const absl::Status status = WithContext(
      WithRetryAfter(absl::ResourceExhaustedError("full"), absl::Milliseconds(5)), "head \"a\"");

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "head \"a\": full");
  EXPECT_EQ(RetryAfter(status), absl::Milliseconds(5));
}

TEST(ErrorsTest, LeavesOkWithoutContext) { EXPECT_TRUE(WithContext(absl::OkStatus(), "x").ok()); }

absl::StatusOr<int> Halve(int value) {
  if (value % 2 != 0) {
    return absl::InvalidArgumentError("odd");
  }
  return value / 2;
}

absl::StatusOr<int> Quarter(int value) {
  LOGPROBD_ASSIGN_OR_RETURN(const int half, Halve(value));
  LOGPROBD_ASSIGN_OR_RETURN(const int quarter, Halve(half));
  LOGPROBD_RETURN_IF_ERROR(absl::OkStatus());
  return quarter;
}

TEST(ErrorsTest, ReturnsFromTheFunctionOnTheFirstError) {
  EXPECT_EQ(Quarter(8).value(), 2);
  EXPECT_EQ(Quarter(6).status(), absl::InvalidArgumentError("odd"));
}

TEST(RejectionTest, IsCarriedByTheStatus) {
  const absl::Status status =
      WithRejection(absl::ResourceExhaustedError("full"), Rejection::kClientShare);

  EXPECT_EQ(RejectionOf(status), Rejection::kClientShare);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
}

TEST(RejectionTest, FollowsFromTheCodeOtherwise) {
  EXPECT_EQ(RejectionOf(absl::DeadlineExceededError("")), Rejection::kDeadline);
  EXPECT_EQ(RejectionOf(absl::UnavailableError("")), Rejection::kNotReady);
  EXPECT_EQ(RejectionOf(absl::InvalidArgumentError("")), Rejection::kInvalid);
  EXPECT_EQ(RejectionOf(absl::NotFoundError("")), Rejection::kInvalid);
}

}  // namespace

}  // namespace logprobd
