#include "server/base/log_limiter.h"

#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"

namespace logprobd::testing {
namespace {

TEST(LogLimiterTest, LetsABoundedNumberOfLinesThroughInAWindow) {
  FakeClock clock;
  LogLimiter limiter(2, absl::Seconds(1), clock);

  EXPECT_EQ(limiter.Admit(), 0);
  EXPECT_EQ(limiter.Admit(), 0);
  EXPECT_FALSE(limiter.Admit().has_value());
  EXPECT_FALSE(limiter.Admit().has_value());
}

TEST(LogLimiterTest, SaysHowManyLinesItHeldBack) {
  FakeClock clock;
  LogLimiter limiter(1, absl::Seconds(1), clock);
  EXPECT_EQ(limiter.Admit(), 0);
  EXPECT_FALSE(limiter.Admit().has_value());
  EXPECT_FALSE(limiter.Admit().has_value());

  clock.Advance(absl::Seconds(1));

  EXPECT_EQ(limiter.Admit(), 2);
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(limiter.Admit(), 0);
}

}  // namespace
}  // namespace logprobd::testing
