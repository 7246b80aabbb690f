#include "server/app/process_limits.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>

namespace logprobd {
namespace {

/// Ends the process with 0 when the check passes, else prints its message and ends with 1.
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
              "open files is 40, at least 256");
}

TEST(ProcessLimitsDeathTest, RaisesTheSoftLimitAsFarAsItMay) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(CheckWithOpenFiles(40, 1'000), ::testing::ExitedWithCode(0), "soft limit 1000");
}

}  // namespace
}  // namespace logprobd
