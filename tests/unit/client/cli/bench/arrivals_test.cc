#include "client/cli/bench/arrivals.h"

#include <cmath>

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

TEST(ArrivalScheduleTest, FixedArrivalsAreEvenAndDoNotDrift) {
  ArrivalSchedule schedule(Arrivals::kFixed, 3, /*seed=*/1);

  EXPECT_EQ(schedule.Next(), absl::ZeroDuration());
  EXPECT_EQ(schedule.Next(), absl::Seconds(1.0 / 3));
  absl::Duration last;
  for (int i = 2; i <= 3'000; ++i) last = schedule.Next();
  EXPECT_EQ(last, absl::Seconds(1'000));
}

TEST(ArrivalScheduleTest, PoissonGapsHaveTheMeanAndTheSpreadOfTheirRate) {
  constexpr int kGaps = 100'000;
  ArrivalSchedule schedule(Arrivals::kPoisson, 50, /*seed=*/1);

  double sum = 0;
  double squares = 0;
  double before = 0;
  for (int i = 0; i < kGaps; ++i) {
    const double now = absl::ToDoubleSeconds(schedule.Next());
    const double gap = now - before;
    ASSERT_GE(gap, 0);
    sum += gap;
    squares += gap * gap;
    before = now;
  }

  // An exponential gap's standard deviation is its mean, 20 ms; six standard errors.
  const double mean = sum / kGaps;
  EXPECT_NEAR(mean, 0.02, 6 * 0.02 / std::sqrt(kGaps));
  EXPECT_NEAR(std::sqrt(squares / kGaps - mean * mean), 0.02, 0.001);
}

TEST(ArrivalScheduleTest, TheSameSeedGivesTheSameTimes) {
  ArrivalSchedule one(Arrivals::kPoisson, 50, /*seed=*/7);
  ArrivalSchedule again(Arrivals::kPoisson, 50, /*seed=*/7);
  ArrivalSchedule other(Arrivals::kPoisson, 50, /*seed=*/8);

  const absl::Duration first = one.Next();

  EXPECT_EQ(first, again.Next());
  EXPECT_NE(first, other.Next());
}

}  // namespace
}  // namespace logprobd::client
