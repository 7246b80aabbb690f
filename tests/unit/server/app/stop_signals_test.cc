#include "server/app/stop_signals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(StopSignalsTest, CallsForEachSignalWithItsNumber) {
  absl::Mutex mutex;
  std::vector<std::pair<int, int>> seen;
  const auto await = [&](size_t count) {
    const absl::MutexLock lock(&mutex);
    const auto arrived = [&] { return seen.size() == count; };
    mutex.Await(absl::Condition(&arrived));
  };
  const StopSignals signals(
      [&](int signal, int count) {
        const absl::MutexLock lock(&mutex);
        seen.emplace_back(signal, count);
      },
      [&] {
        const absl::MutexLock lock(&mutex);
        seen.emplace_back(SIGHUP, 0);
      });

  kill(getpid(), SIGTERM);
  await(1);
  kill(getpid(), SIGHUP);
  await(2);
  kill(getpid(), SIGINT);
  await(3);

  EXPECT_THAT(seen, ElementsAre(Pair(SIGTERM, 1), Pair(SIGHUP, 0), Pair(SIGINT, 2)));
}

TEST(StopSignalsTest, EndsWithoutASignal) {
  const StopSignals signals([](int, int) { FAIL() << "nothing was sent"; },
                            [] { FAIL() << "nothing was sent"; });
}

}  // namespace
}  // namespace logprobd
