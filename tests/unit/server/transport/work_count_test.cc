#include "server/transport/work_count.h"

#include <thread>

#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"

namespace logprobd {
namespace {

TEST(WorkCountTest, WaitsForTheLastOne) {
  testing::FakeClock clock;
  WorkCount work;
  work.Begin();
  work.Begin();
  work.End();
  const absl::Time until = clock.Now() + absl::Seconds(10);

  std::thread last([&] {
    clock.WaitForWaiter(until);
    work.End();
  });

  EXPECT_TRUE(work.AwaitNone(clock, until));
  last.join();
}

TEST(WorkCountTest, GivesUpAtTheGivenTime) {
  testing::FakeClock clock;
  WorkCount work;
  work.Begin();
  const absl::Time until = clock.Now() + absl::Seconds(10);

  std::thread time([&] {
    clock.WaitForWaiter(until);
    clock.Advance(absl::Seconds(10));
  });

  EXPECT_FALSE(work.AwaitNone(clock, until));
  EXPECT_EQ(work.count(), 1);
  time.join();
}

}  // namespace
}  // namespace logprobd
