#include "server/app/run/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

namespace logprobd {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::StartsWith;

struct Outcome {
  int exit_status = 0;
  std::string output;
  std::string errors;
};

Outcome RunProgram(const std::vector<std::string>& arguments,
                   const std::vector<std::string>& environment = {}) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Outcome outcome;
  outcome.exit_status = RunLogprobd(arguments, environment);
  std::fflush(stdout);
  outcome.output = ::testing::internal::GetCapturedStdout();
  outcome.errors = ::testing::internal::GetCapturedStderr();
  return outcome;
}

TEST(RunTest, PrintsHelpVersionAndConfiguration) {
  EXPECT_THAT(RunProgram({"--help"}).output, HasSubstr("--batch-rows ROWS"));
  EXPECT_THAT(RunProgram({"--version"}).output,
              MatchesRegex("logprobd [0-9.]+ \\([0-9a-z]+, gRPC [0-9.]+\\)\n"));
  EXPECT_THAT(RunProgram({"--print-config"}, {"LOGPROBD_GPUS=2"}).output,
              HasSubstr("gpus = \"2\"  # LOGPROBD_GPUS\n"));
  EXPECT_EQ(RunProgram({"--help"}).exit_status, kExitStopped);
}

TEST(RunTest, ExitsWith2AndOneLineForBadSettings) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{},
                                                    {"--bogus"},
                                                    {"--model=x", "--batch-rows=0"},
                                                    {"--config=/nowhere/logprobd.toml"}}) {
    const Outcome outcome = RunProgram(arguments);
    EXPECT_EQ(outcome.exit_status, kExitBadSettings);
    EXPECT_THAT(outcome.errors, StartsWith("logprobd: error: "));
    EXPECT_EQ(outcome.errors.find('\n'), outcome.errors.size() - 1);
  }
}

TEST(RunTest, ExitsWith1AndOneLineForAMissingModel) {
  for (const char* action : {"--dry-run", "--log-level=error"}) {
    const Outcome outcome =
        RunProgram({"--model=/nowhere\nat all", "--listen=127.0.0.1:0", action});
    EXPECT_EQ(outcome.exit_status, kExitFailed);
    EXPECT_THAT(outcome.errors, StartsWith("logprobd: error: "));
    EXPECT_EQ(outcome.errors.find('\n'), outcome.errors.size() - 1);
  }
}

}  // namespace
}  // namespace logprobd
