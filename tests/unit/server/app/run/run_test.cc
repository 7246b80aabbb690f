#include "server/app/run/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/model_folder.h"
#include "tests/support/temp_folder.h"

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

// A service manager does not start a server again that has ended with 2.
TEST(RunTest, ExitsWith2ForWhatOnlyAnEditMendsAndWith1ForWhatMayMendItself) {
  const testing::TempFolder folder;
  const std::string file = folder.Write("file", "text");
  const std::string tokens = folder.Write("tokens", "[[token]]\n");
  folder.Write("empty/config.json", "{}");
  folder.Write("damaged/config.json", "{");
  folder.Write("damaged/model.safetensors", "");
  folder.Write("pickle/config.json", "{}");
  folder.Write("pickle/model.bin", "");
  const testing::ModelFolder good;
  good.WriteConfig(R"({"hidden_size": 8, "vocab_size": 4})");
  good.WriteTensors({testing::MakeRandomTensor("lm_head.weight", Dtype::kBf16, {4, 8}, 1, 1)});
  const std::string good_model = absl::StrCat("--model=", good.path());
  const std::string tls = absl::StrCat("--tls-cert=", file);
  const std::string tls_key = absl::StrCat("--tls-key=", file);
  struct Case {
    int exit_status;
    std::vector<std::string> arguments;
  };
  for (const Case& each : std::vector<Case>{
           {kExitBadSettings, {good_model, absl::StrCat("--tokens=", tokens)}},
           {kExitBadSettings, {good_model, absl::StrCat("--tokens=", folder.path("none"))}},
           {kExitBadSettings, {good_model, absl::StrCat("--tokens=", folder.path())}},
           {kExitBadSettings, {good_model, "--admin=auto", absl::StrCat("--weights-root=", file)}},
           {kExitFailed,
            {good_model, "--admin=auto", absl::StrCat("--weights-root=", folder.path("none"))}},
           {kExitFailed, {good_model, "--admin=192.0.2.1:0", "--insecure"}},
           {kExitFailed, {good_model, tls, tls_key}},
           {kExitFailed, {absl::StrCat("--model=", folder.path("none"))}},
           {kExitFailed, {absl::StrCat("--model=", folder.path("empty"))}},
           {kExitBadSettings, {absl::StrCat("--model=", folder.path("damaged"))}},
           {kExitBadSettings, {absl::StrCat("--model=", folder.path("pickle"))}},
           {kExitBadSettings, {good_model, "--head-tensor=none"}},
           {kExitBadSettings, {good_model, "--valid-vocab=99999999"}}}) {
    std::vector<std::string> arguments = {"--listen=127.0.0.1:0", "--http=none", "--local=none",
                                          "--device=cpu"};
    arguments.insert(arguments.end(), each.arguments.begin(), each.arguments.end());
    const Outcome outcome = RunProgram(arguments);
    EXPECT_EQ(outcome.exit_status, each.exit_status) << each.arguments.back() << outcome.errors;
    EXPECT_THAT(outcome.errors, HasSubstr("logprobd: error: "));
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
