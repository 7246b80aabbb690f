#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/model_folder.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Outcome {
  int exit_code = 0;
  std::string out;
  std::string err;
};

/// A model whose head has 8 rows of 4 values, of which 6 are valid, and a folder for its export.
class ExportCommandTest : public ::testing::Test {
 protected:
  ExportCommandTest() {
    model_.WriteConfig(R"({"model_type":"llama","hidden_size":4,"vocab_size":6})");
    model_.WriteTensors({logprobd::testing::MakeRandomTensor(
        "lm_head.weight", logprobd::Dtype::kBf16, {8, 4}, 1, 1)});
  }

  Outcome Run(const std::vector<std::string>& options, bool is_terminal = false) const {
    std::vector<std::string> arguments = {"export-head", model_.path(), out_};
    arguments.insert(arguments.end(), options.begin(), options.end());
    std::ostringstream out;
    std::ostringstream err;
    const int exit_code = RunCli(arguments, {.out = out, .err = err, .is_terminal = is_terminal});
    return {.exit_code = exit_code, .out = out.str(), .err = err.str()};
  }

  const logprobd::testing::ModelFolder model_;
  const logprobd::testing::ModelFolder parent_;
  const std::string out_ = parent_.PathOf("head");
};

TEST_F(ExportCommandTest, DescribesTheHeadThatItWrote) {
  const Outcome outcome = Run({});

  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, StartsWith("wrote " + out_ +
                                      ": llama: hidden 4, vocab 6 of 8 rows, lm_head.weight, bf16, "
                                      "scale 1, no cap, no bias, 0.0 MiB\nsha256 "));
  EXPECT_THAT(outcome.err, HasSubstr("logprobctl: warning: the head has 8 rows"));
  EXPECT_TRUE(std::filesystem::exists(out_ + "/manifest.json"));
}

TEST_F(ExportCommandTest, PrintsJson) {
  const Outcome outcome = Run({"--json"});

  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["path"], out_);
  EXPECT_EQ(report["tensor"], "lm_head.weight");
  EXPECT_EQ(report["vocab_rows"], 8);
  EXPECT_EQ(report["sha256"].get<std::string>().size(), 64U);
  EXPECT_EQ(report["warnings"].size(), 1U);
}

TEST_F(ExportCommandTest, ShowsItsProgressOnATerminal) {
  EXPECT_THAT(Run({}, /*is_terminal=*/true).err, HasSubstr("hashing config.json 0% (0 B of "));
}

TEST_F(ExportCommandTest, ReplacesAnExportOnlyWithForce) {
  ASSERT_EQ(Run({}).exit_code, 0);

  const Outcome refused = Run({"--json"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_EQ(nlohmann::json::parse(refused.out)["error"]["code"], "ALREADY_EXISTS");
  EXPECT_THAT(refused.err, HasSubstr("--force replaces a folder"));
  EXPECT_EQ(Run({"--force"}).exit_code, 0);
}

TEST_F(ExportCommandTest, ReportsAHeadThatIsNotFound) {
  const Outcome outcome = Run({"--head-tensor", "absent.weight"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("no tensor 'absent.weight'"));
  EXPECT_FALSE(std::filesystem::exists(out_));
}

}  // namespace
}  // namespace logprobd::client
