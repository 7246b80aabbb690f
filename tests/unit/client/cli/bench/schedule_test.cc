#include "client/cli/bench/schedule.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(RowMixTest, EachSizeIsALoad) {
  const auto loads = ParseRows("1,256,8192");

  ASSERT_TRUE(loads.ok()) << loads.status();
  ASSERT_EQ(loads->size(), 3U);
  EXPECT_EQ((*loads)[1].Text(), "256");
  EXPECT_EQ((*loads)[2].rows_max(), 8'192);
}

TEST(RowMixTest, SizesWithWeightsAreOneMix) {
  const auto loads = ParseRows("1:80,256:15,8192:5");

  ASSERT_TRUE(loads.ok()) << loads.status();
  ASSERT_EQ(loads->size(), 1U);
  EXPECT_EQ((*loads)[0].Text(), "1:80,256:15,8192:5");
  EXPECT_EQ((*loads)[0].rows_max(), 8'192);
}

TEST(RowMixTest, DrawsSizesByTheirWeight) {
  const RowMix mix = (*ParseRows("1:80,256:15,8192:5"))[0];

  std::vector<int> drawn(3);
  for (int64_t request = 0; request < 100'000; ++request) ++drawn[mix.Draw(/*seed=*/1, request)];

  // The tolerances are six standard errors.
  EXPECT_NEAR(drawn[0], 80'000, 760);
  EXPECT_NEAR(drawn[1], 15'000, 680);
  EXPECT_NEAR(drawn[2], 5'000, 420);
}

TEST(RowMixTest, TheSizeOfARequestDependsOnSeedAndIndexOnly) {
  const RowMix mix = (*ParseRows("1:1,2:1"))[0];

  int differences = 0;
  for (int64_t request = 0; request < 100; ++request) {
    EXPECT_EQ(mix.Draw(5, request), mix.Draw(5, request));
    if (mix.Draw(5, request) != mix.Draw(6, request)) ++differences;
  }

  EXPECT_GT(differences, 20);
}

TEST(RowMixTest, SaysWhatIsWrong) {
  const auto message = [](const char* text) {
    return std::string(ParseRows(text).status().message());
  };

  EXPECT_THAT(message("0"), HasSubstr("\"0\" is not a number of rows from 1 to 16777216"));
  EXPECT_THAT(message("1,"), HasSubstr("is not a number of rows"));
  EXPECT_THAT(message("16777217"), HasSubstr("is not a number of rows"));
  EXPECT_THAT(message("1:80,256"), HasSubstr("\"256\" is not rows:weight"));
  EXPECT_THAT(message("1:0"), HasSubstr("a weight above 0"));
  EXPECT_THAT(message("1:nan"), HasSubstr("a weight above 0"));
  EXPECT_THAT(message("4:1,4:2"), HasSubstr("contains 4 rows twice"));
  const std::string many = absl::StrJoin(std::vector<int>(65, 7), ",");
  EXPECT_THAT(message(many.c_str()), HasSubstr("more than 64 sizes"));
}

TEST(RangeTest, CountsFromStartToEnd) {
  EXPECT_THAT(*ParseRange("4"), ElementsAre(4));
  EXPECT_THAT(*ParseRange("1:3"), ElementsAre(1, 2, 3));
  EXPECT_THAT(*ParseRange("1:16:5"), ElementsAre(1, 6, 11, 16));
  EXPECT_THAT(*ParseRange("2:5:2"), ElementsAre(2, 4));
}

TEST(RangeTest, RefusesMalformedRanges) {
  for (const char* text :
       {"", "0", "-1", "x", "1:", "3:1", "1:2:0", "1:2:3:4", "1:100000", "1:9223372036854775807"}) {
    EXPECT_FALSE(ParseRange(text).ok()) << text;
  }
}

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

  // The standard deviation of an exponential gap is its mean, 20 ms. The tolerance is six standard
  // errors.
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
