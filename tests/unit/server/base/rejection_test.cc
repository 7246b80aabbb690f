#include "server/base/rejection.h"

#include "gtest/gtest.h"

namespace logprobd {
namespace {

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
