#include "server/app/load_progress.h"

#include <gtest/gtest.h>

#include "tests/support/fake_clock.h"

namespace logprobd {
namespace {

TEST(LoadProgressTest, SaysHowFarItIs) {
  const testing::FakeClock clock;
  LoadProgress progress(false, clock);
  EXPECT_EQ(progress.Text(), "");

  progress.Update(25 << 20, 100 << 20);

  EXPECT_EQ(progress.Text(), "25 % of 100.0 MiB");
  progress.Finish();
  EXPECT_EQ(progress.Text(), "");  // the next head began with what the one before had ended
}

TEST(LoadProgressTest, DrawsOnATerminalTenTimesASecondAtMost) {
  testing::FakeClock clock;
  LoadProgress progress(true, clock);
  ::testing::internal::CaptureStderr();

  progress.Update(1, 100);
  progress.Update(2, 100);
  clock.Advance(absl::Milliseconds(100));
  progress.Update(3, 100);
  progress.Finish();
  progress.Finish();

  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "\r\033[Kloading the weights: 1 % of 100 B"
            "\r\033[Kloading the weights: 3 % of 100 B"
            "\r\033[K");
}

TEST(LoadProgressTest, IsSilentWithoutATerminal) {
  const testing::FakeClock clock;
  LoadProgress progress(false, clock);
  ::testing::internal::CaptureStderr();

  progress.Update(1, 100);
  progress.Finish();

  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace logprobd
