#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/fake_weights_service.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Outcome {
  int exit_code = 0;
  std::string out;
  std::string err;
};

Outcome RunProgram(const std::vector<std::string>& arguments, bool is_terminal = false) {
  std::ostringstream out;
  std::ostringstream err;
  const int exit_code = RunCli(arguments, {.out = out, .err = err, .is_terminal = is_terminal});
  return {.exit_code = exit_code, .out = out.str(), .err = err.str()};
}

/// A fake server whose version 1 is live. A load creates version 2.
class WeightsCommandTest : public ::testing::Test {
 protected:
  WeightsCommandTest() {
    v1::HeadWeightsState& state = server_.service().state();
    state.set_head("policy");
    state.mutable_live()->set_version(1);
    state.mutable_live()->set_source("/models/step-100");
    state.mutable_live()->set_weight_bytes(3 << 20);
    state.mutable_live()->set_dtype(v1::DTYPE_F32);
    state.mutable_live()->set_loaded_unix_seconds(1'700'000'000);
    v1::LoadWeightsProgress progress;
    progress.set_phase("verifying");
    progress.set_bytes_done(1 << 20);
    progress.set_bytes_total(4 << 20);
    v1::LoadWeightsProgress done;
    done.set_phase("done");
    done.mutable_done()->set_version(2);
    done.mutable_done()->set_sha256("00ff");
    done.mutable_done()->set_source("/models/step-200");
    done.mutable_done()->set_weight_bytes(4 << 20);
    done.mutable_done()->set_dtype(v1::DTYPE_BF16);
    server_.service().progress() = {progress, done};
  }

  Outcome Run(std::vector<std::string> arguments, bool is_terminal = false) {
    arguments.insert(arguments.begin(), "weights");
    arguments.insert(arguments.end(), {"--admin", server_.address()});
    return RunProgram(arguments, is_terminal);
  }

  testing::FakeWeightsServer server_;
};

TEST_F(WeightsCommandTest, LoadSendsItsOptions) {
  const Outcome outcome = Run({"load", "--head", "policy", "--version", "200", "--sha256", "00ff",
                               "--commit", "--in-place", "--allow-nonfinite", "/models/step-200"});

  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(server_.service().calls(),
              ElementsAre("Load head: \"policy\" path: \"/models/step-200\" version: 200 "
                          "sha256: \"00ff\" commit: true in_place: true allow_nonfinite: true"));
  EXPECT_THAT(outcome.out, HasSubstr("version 2 is live: bf16, 4 MiB from /models/step-200\n"));
}

TEST_F(WeightsCommandTest, LoadSaysHowToMakeItLive) {
  const Outcome outcome = Run({"load", "/models/step-200"});

  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out,
            "version 2 is staged: bf16, 4 MiB from /models/step-200\nsha256 00ff\n"
            "make it live with: logprobctl weights commit\n");
  EXPECT_EQ(outcome.err, "");
}

TEST_F(WeightsCommandTest, LoadShowsItsProgressOnATerminal) {
  EXPECT_THAT(Run({"load", "/models/step-200"}, /*is_terminal=*/true).err,
              HasSubstr("\rverifying 25% (1 MiB of 4 MiB)"));
}

TEST_F(WeightsCommandTest, LoadPrintsJson) {
  const auto report = nlohmann::json::parse(Run({"load", "/models/step-200", "--json"}).out);

  EXPECT_EQ(report["version"], 2);
  EXPECT_EQ(report["dtype"], "bf16");
  EXPECT_EQ(report["sha256"], "00ff");
  EXPECT_EQ(report["state"], "staged");
}

TEST_F(WeightsCommandTest, LoadSendsAnAbsolutePath) {
  Run({"load", "models/../step-200"});

  EXPECT_THAT(server_.service().calls().at(0),
              HasSubstr((std::filesystem::current_path() / "step-200").string() + "\""));
}

TEST_F(WeightsCommandTest, ListShowsEveryVersion) {
  server_.service().state().mutable_staged()->set_version(2);
  server_.service().state().mutable_previous()->set_version(7);
  server_.service().state().mutable_pushed()->set_version(8);
  server_.service().state().mutable_pushed()->set_rows(10);
  server_.service().state().mutable_pushed()->set_vocab_rows(1'000);
  server_.service().state().set_highest_version(9);

  const Outcome text = Run({"list"});
  const auto report = nlohmann::json::parse(Run({"list", "--json", "--head", "policy"}).out);

  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out,
              AllOf(HasSubstr("live        1      f32    3 MiB  2023-11-14 22:13:20  unknown"),
                    HasSubstr("staged        2"), HasSubstr("previous        7"),
                    HasSubstr("pushed        8"), HasSubstr("10 of 1000 rows")));
  EXPECT_EQ(report["heads"][0]["head"], "policy");
  EXPECT_EQ(report["heads"][0]["live"]["source"], "/models/step-100");
  EXPECT_EQ(report["heads"][0]["live"]["dtype"], "f32");
  EXPECT_EQ(report["heads"][0]["staged"]["version"], 2);
  EXPECT_EQ(report["heads"][0]["pushed"]["rows"], 10);
  EXPECT_EQ(report["heads"][0]["highest_version"], 9);
  EXPECT_THAT(server_.service().calls(), ElementsAre("List", "List head: \"policy\""));
}

TEST_F(WeightsCommandTest, ListSaysWhenNoVersionIsLive) {
  server_.service().state().clear_live();

  EXPECT_THAT(Run({"list"}).out, HasSubstr("NONE LIVE"));
  EXPECT_TRUE(nlohmann::json::parse(Run({"list", "--json"}).out)["heads"][0]["live"].is_null());
}

TEST_F(WeightsCommandTest, ChangesPrintTheVersionsOfTheHead) {
  for (const std::vector<std::string>& line :
       std::vector<std::vector<std::string>>{{"commit", "--version", "2"},
                                             {"rollback", "--head", "policy"},
                                             {"discard", "--staged"},
                                             {"discard", "--previous", "--staged"}}) {
    const Outcome outcome = Run(line);

    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("/models/step-100"));
  }
  EXPECT_THAT(server_.service().calls(),
              ElementsAre("Commit version: 2", "Rollback head: \"policy\"", "Discard staged: true",
                          "Discard staged: true previous: true"));
  EXPECT_EQ(nlohmann::json::parse(Run({"commit", "--json"}).out)["live"]["version"], 1);
}

TEST_F(WeightsCommandTest, FailsWithTheServersReason) {
  server_.service().FailWith({grpc::StatusCode::DATA_LOSS, "sha256: another"});

  for (const std::string command : {"load", "list", "commit", "rollback"}) {
    std::vector<std::string> line = {command, "--json"};
    if (command == "load") line.emplace_back("/models/step-200");
    const Outcome outcome = Run(line);

    EXPECT_EQ(outcome.exit_code, 1) << command;
    EXPECT_EQ(outcome.err, "logprobctl: DATA_LOSS: sha256: another\n");
    EXPECT_EQ(nlohmann::json::parse(outcome.out)["error"]["code"], "DATA_LOSS");
  }
}

TEST_F(WeightsCommandTest, TheAddressMayComeFromTheEnvironmentOrFromAddress) {
  setenv("LOGPROBD_ADMIN", server_.address().c_str(), 1);
  const Outcome from_environment = RunProgram({"weights", "list"});
  const Outcome from_flag = RunProgram({"weights", "list", "--admin", "127.0.0.1:1"});
  unsetenv("LOGPROBD_ADMIN");
  const Outcome from_address = RunProgram({"weights", "list", "--address", server_.address()});

  EXPECT_EQ(from_environment.exit_code, 0) << from_environment.err;
  EXPECT_EQ(from_flag.exit_code, 1);
  EXPECT_EQ(from_address.exit_code, 0) << from_address.err;
}

TEST_F(WeightsCommandTest, HelpTeachesByExample) {
  EXPECT_THAT(RunProgram({"weights", "--help"}).out,
              AllOf(HasSubstr("--admin auto"), HasSubstr("Examples:\n  logprobctl weights load")));
  for (const std::string command : {"load", "list", "commit", "rollback", "discard"}) {
    const Outcome outcome = RunProgram({"weights", command, "--help"});

    EXPECT_EQ(outcome.exit_code, 0) << command;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("Examples:\n  logprobctl weights " + command),
                                   HasSubstr("LOGPROBD_ADMIN"), HasSubstr("--timeout"),
                                   HasSubstr("--json"), HasSubstr("--head")));
  }
}

TEST_F(WeightsCommandTest, ExitsWithTwoForAMalformedCommandLine) {
  const std::vector<std::vector<std::string>> lines = {{"weights"},
                                                       {"weights", "swap"},
                                                       {"weights", "load"},
                                                       {"weights", "load", "/m", "--version", "x"},
                                                       {"weights", "load", "/m", "--timeout", "0"},
                                                       {"weights", "discard"},
                                                       {"weights", "commit", "/m"}};
  for (const std::vector<std::string>& line : lines) {
    const Outcome outcome = RunProgram(line);

    EXPECT_EQ(outcome.exit_code, 2) << ::testing::PrintToString(line);
    EXPECT_THAT(outcome.err, Not(IsEmpty())) << ::testing::PrintToString(line);
  }
}

}  // namespace
}  // namespace logprobd::client
