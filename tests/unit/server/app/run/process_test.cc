#include "server/app/run/process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "server/app/run/run.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
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

  ::testing::internal::CaptureStderr();
  kill(getpid(), SIGTERM);
  await(1);
  kill(getpid(), SIGHUP);
  await(2);
  kill(getpid(), SIGINT);
  await(3);

  EXPECT_THAT(seen, ElementsAre(Pair(SIGTERM, 1), Pair(SIGHUP, 0), Pair(SIGINT, 2)));
  const std::string log = ::testing::internal::GetCapturedStderr();
  for (const char* name : {"SIGTERM", "SIGHUP", "SIGINT"}) {
    EXPECT_THAT(log, HasSubstr(absl::StrCat(" audit signal=", name, " user=", getuid(),
                                            " process=", getpid(), "\n")));
  }
}

TEST(StopSignalsTest, JoinsItsThreadWithoutASignal) {
  const StopSignals signals([](int, int) { FAIL() << "nothing was sent"; },
                            [] { FAIL() << "nothing was sent"; });
}

TEST(ExitHungAfterTest, EndsTheProcessAtOnceWithoutADelay) {
  EXPECT_EXIT(ExitHungAfter(absl::ZeroDuration()), ::testing::ExitedWithCode(kExitHung), "");
}

TEST(ExitHungAfterTest, EndsTheProcessThoughAllItsThreadsHang) {
  EXPECT_EXIT(
      {
        ExitHungAfter(absl::Milliseconds(1));
        absl::Notification never;
        never.WaitForNotification();
      },
      ::testing::ExitedWithCode(kExitHung), "");
}

/// Prints the message of the check and exits with 0 if the check passes, otherwise with 1.
[[noreturn]] void CheckWithOpenFiles(rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  setrlimit(RLIMIT_NOFILE, &limit);
  const absl::Status status = PrepareProcessLimits();
  rlimit now{};
  getrlimit(RLIMIT_NOFILE, &now);
  std::fprintf(stderr, "%s soft limit %lu", std::string(status.message()).c_str(), now.rlim_cur);
  std::exit(status.ok() ? 0 : 1);
}

TEST(ProcessLimitsDeathTest, RefusesTooFewOpenFilesAndNamesTheLimit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(CheckWithOpenFiles(40, 40), ::testing::ExitedWithCode(1),
              "open files is 40, but at least 256");
}

TEST(ProcessLimitsDeathTest, RaisesTheSoftLimitToTheHardLimit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(CheckWithOpenFiles(40, 1'000), ::testing::ExitedWithCode(0), "soft limit 1000");
}

// Regression: a listener got the number of a closed standard error, and with it the log.
TEST(StandardStreamsDeathTest, ClosedOnesBecomeDevNull) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto open_and_look = [] {
    close(STDIN_FILENO);
    close(STDERR_FILENO);
    OpenClosedStandardStreams();
    for (const char* const file : {"/proc/self/fd/0", "/proc/self/fd/2"}) {
      if (std::filesystem::read_symlink(file) != "/dev/null") std::exit(1);
    }
    std::exit(0);
  };
  EXPECT_EXIT(open_and_look(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace logprobd
