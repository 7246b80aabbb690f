#include "client/cli/command.h"

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/fake_scoring_service.h"
#include "tests/support/loopback_listener.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/cli/file_bytes.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
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

TEST(CommandLineTest, HelpTeachesByExample) {
  for (const std::string command : {"ping", "info", "score", "selftest", "bench"}) {
    const Outcome outcome = RunProgram({command, "--help"});

    EXPECT_EQ(outcome.exit_code, 0) << command;
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("Examples:\n  logprobctl " + command),
                      HasSubstr("LOGPROBD_ADDRESS"), HasSubstr("--timeout"), HasSubstr("--json")));
  }
}

TEST(CommandLineTest, PrintsItsVersion) {
  EXPECT_THAT(RunProgram({"--version"}).out, HasSubstr("logprobctl 0."));
}

TEST(CommandLineTest, ExitsWithTwoForAMalformedCommandLine) {
  const std::vector<std::vector<std::string>> lines = {
      {},
      {"pong"},
      {"ping", "--nope"},
      {"ping", "--timeout", "soon"},
      {"ping", "--timeout", "-1"},
      {"ping", "--count", "0"},
      {"score"},
      {"score", "--hidden", "h.npy"},
      {"score", "a.safetensors", "--format", "npy"},
      {"score", "a.safetensors", "--format", "npy", "--output", "out", "--trace"},
      {"score", "a.safetensors", "--outputs", "logits"},
      {"score", "a.safetensors", "--priority", "urgent"},
      {"bench", "--concurrency-range", "3:1"},
      {"bench", "--rows", "0"},
      {"bench", "--duration", "1s", "--requests", "5"},
      {"bench", "--dtype", "f8"},
      {"bench", "--export", "b.txt"},
      {"bench", "--rows", "1:80,256"},
      {"bench", "--arrivals", "fixed"},
      {"bench", "--request-rate", "10", "--arrivals", "bursts"},
      {"bench", "--windows-max", "2"},
      {"bench", "--stability", "0"},
      {"bench", "--transport", "rdma"},
      {"selftest", "--rows", "65"}};

  for (const std::vector<std::string>& line : lines) {
    const Outcome outcome = RunProgram(line);

    EXPECT_EQ(outcome.exit_code, 2) << ::testing::PrintToString(line);
    EXPECT_THAT(outcome.err, Not(IsEmpty())) << ::testing::PrintToString(line);
  }
}

// Regression: `--output x.npy` wrote lines of JSON to that file.
TEST(CommandLineTest, RefusesAnOutputWhoseNamePromisesAnotherFormat) {
  for (const std::string name : {"x.npy", "X.NPY", "x.npz", "rows.safetensors", "x.pt"}) {
    const Outcome lines = RunProgram({"score", "a.safetensors", "--output", name});
    const Outcome arrays =
        RunProgram({"score", "a.safetensors", "--output", name, "--format", "npy"});

    EXPECT_EQ(lines.exit_code, 2);
    EXPECT_THAT(lines.err, AllOf(HasSubstr(name), HasSubstr("give --format npy and a folder")));
    EXPECT_EQ(arrays.exit_code, 2);
    EXPECT_THAT(arrays.err, HasSubstr("writes one file per output to a folder"));
  }
}

TEST(CommandLineTest, NamesTheAddressWhereNoServerAnswers) {
  const Outcome outcome = RunProgram({"ping", "--address", "127.0.0.1:1", "--json"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["error"]["code"], "UNAVAILABLE");
  EXPECT_THAT(outcome.err, HasSubstr("check that logprobd runs and is ready at 127.0.0.1:1"));
}

TEST(CommandLineTest, SaysWhatItWaitsForIfTheServerDoesNotAnswer) {
  const testing::LoopbackListener server;

  const Outcome outcome = RunProgram({"info", "--address", server.address(), "--timeout", "1.5s"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err,
              HasSubstr("waiting for the server at " + server.address() + ", for up to 1.5s"));
}

TEST(DurationTest, TakesSecondsAndUnits) {
  EXPECT_EQ(*ParseDurationText("30"), absl::Seconds(30));
  EXPECT_EQ(*ParseDurationText("1.5s"), absl::Milliseconds(1500));
  EXPECT_EQ(*ParseDurationText("500ms"), absl::Milliseconds(500));
  EXPECT_EQ(*ParseDurationText("2m"), absl::Minutes(2));
  for (const char* text : {"", "0", "-5s", "soon", "inf", "nan"}) {
    EXPECT_FALSE(ParseDurationText(text).ok()) << text;
  }
}

TEST(OutputNamesTest, AddsUpTheNamedBits) {
  EXPECT_EQ(*ParseOutputs({"logprob"}), output::kLogprob);
  EXPECT_EQ(*ParseOutputs({"argmax", "min_logit", "argmax"}), output::kArgmax | output::kMinLogit);
  EXPECT_EQ(*ParseOutputs({"greedy", "sum_p_squared"}), output::kGreedy | output::kSumPSquared);
  EXPECT_EQ(*ParseOutputs({"target_rank"}), output::kTargetRank);
  EXPECT_EQ(*ParseOutputs({"all"}), 511U);
}

TEST(OutputNamesTest, ListsTheNamesIfOneIsUnknown) {
  EXPECT_THAT(std::string(ParseOutputs({"logits"}).status().message()),
              HasSubstr("output \"logits\" is not known: choose from logprob, entropy"));
}

class CommandTest : public ::testing::Test {
 protected:
  Outcome Run(std::vector<std::string> arguments, bool is_terminal = false) {
    arguments.insert(arguments.begin() + 1, {"--address", server_.address()});
    return RunProgram(arguments, is_terminal);
  }

  /// Writes a file with `rows` rows of 8 bf16 zeros, where row i has target i.
  std::string RowsFile(int32_t rows) {
    std::vector<int32_t> targets;
    for (int32_t row = 0; row < rows; ++row) targets.push_back(row);
    const std::string hidden_end = std::to_string(rows * 16);
    std::string header = R"({"hidden":{"dtype":"BF16","shape":[)";
    header.append(std::to_string(rows)).append(R"(,8],"data_offsets":[0,)");
    header.append(hidden_end).append(R"(]},"targets":{"dtype":"I32","shape":[)");
    header.append(std::to_string(rows)).append(R"(],"data_offsets":[)").append(hidden_end);
    header.append(",").append(std::to_string(rows * 20)).append("]}}");
    return folder_.Write(
        "rows.safetensors",
        Safetensors(header, std::string(static_cast<size_t>(rows) * 16, '\0') + BytesOf(targets)));
  }

  testing::FakeScoringServer server_;
  testing::TempFolder folder_;
};

TEST_F(CommandTest, PingReportsVersionAndRoundTrip) {
  server_.SetServing(true);

  const Outcome text = Run({"ping"});
  const Outcome json = Run({"ping", "--json"});

  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr(" is ready: logprobd 9.8.7, 1 head, round trip "));
  EXPECT_EQ(nlohmann::json::parse(json.out)["ready"], true);
}

TEST_F(CommandTest, PingFailsWhenTheServerIsNotReady) {
  server_.SetServing(false);

  const Outcome outcome = Run({"ping"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.out, HasSubstr("NOT ready"));
}

TEST_F(CommandTest, AddressMayComeFromTheEnvironment) {
  server_.SetServing(true);
  setenv("LOGPROBD_ADDRESS", server_.address().c_str(), 1);

  const Outcome from_environment = RunProgram({"ping"});
  const Outcome from_flag = RunProgram({"ping", "--address", "127.0.0.1:1"});
  unsetenv("LOGPROBD_ADDRESS");

  EXPECT_EQ(from_environment.exit_code, 0) << from_environment.err;
  EXPECT_EQ(from_flag.exit_code, 1);
}

TEST_F(CommandTest, TheTokenMayComeFromTheEnvironmentOrAFile) {
  setenv("LOGPROBD_TOKEN", "of-the-environment", 1);

  const Outcome from_environment = Run({"score", RowsFile(1)});
  const std::string first = server_.service().authorization();
  const Outcome from_file =
      Run({"score", RowsFile(1), "--token-file", folder_.Write("token", "of-the-file\n")});
  unsetenv("LOGPROBD_TOKEN");

  EXPECT_EQ(from_environment.exit_code, 0) << from_environment.err;
  EXPECT_EQ(first, "Bearer of-the-environment");
  EXPECT_EQ(from_file.exit_code, 0) << from_file.err;
  EXPECT_EQ(server_.service().authorization(), "Bearer of-the-file");
}

TEST_F(CommandTest, InfoShowsTheShardsOfAHead) {
  const Outcome text = Run({"info"});
  const Outcome json = Run({"info", "--json"});

  EXPECT_THAT(text.out, AllOf(HasSubstr("layout of head  replica  shard  device        ids\n"),
                              HasSubstr("fake                  0      1    gpu1  [96, 100)\n")));
  const auto layout = nlohmann::json::parse(json.out)["heads"][0]["layout"];
  ASSERT_EQ(layout.size(), 2U);
  EXPECT_EQ(layout[1]["device"], "gpu1");
  EXPECT_EQ(layout[1]["vocab_begin"], 96);
}

TEST_F(CommandTest, InfoShowsNoLayoutOfAnOlderServer) {
  server_.service().heads().mutable_heads(0)->clear_layout();

  EXPECT_THAT(Run({"info"}).out, Not(HasSubstr("layout")));
  EXPECT_EQ(nlohmann::json::parse(Run({"info", "--json"}).out)["heads"][0]["layout"].size(), 0U);
}

TEST_F(CommandTest, InfoShowsHeadsAndLimits) {
  const Outcome text = Run({"info"});
  const Outcome json = Run({"info", "--json"});

  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, AllOf(HasSubstr("logprobd 9.8.7"), HasSubstr("100 (+28 padding)"),
                              HasSubstr("lm_head.weight (tied)"), HasSubstr("1 MiB")));
  const auto report = nlohmann::json::parse(json.out);
  EXPECT_EQ(report["heads"][0]["vocab_size"], 100);
  EXPECT_EQ(report["heads"][0]["dtype"], "bf16");
  EXPECT_EQ(report["heads"][0]["limits"]["request_rows_max"], 1'000);
}

TEST_F(CommandTest, InfoShowsWhatAHeadDoesToItsLogits) {
  v1::Head& head = *server_.service().heads().mutable_heads(0);
  head.set_scale(1);
  EXPECT_THAT(Run({"info"}).out, HasSubstr("  none  "));

  head.set_softcap(30);
  EXPECT_THAT(Run({"info"}).out, HasSubstr("  softcap 30  "));

  head.set_scale(0.0625F);
  head.set_has_bias(true);
  EXPECT_THAT(Run({"info"}).out, HasSubstr("  scale 0.0625, bias, softcap 30  "));
}

TEST_F(CommandTest, ScoreShowsItsProgressOnATerminal) {
  EXPECT_THAT(Run({"score", RowsFile(3)}, /*is_terminal=*/true).err,
              HasSubstr("scored 3 of 3 rows (100%)"));
}

TEST_F(CommandTest, ScoreWritesJsonLines) {
  const Outcome outcome =
      Run({"score", "--outputs", "logprob,greedy", "--temperature", "0.5", RowsFile(3)});

  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out,
            "{\"row\":0,\"target\":0,\"logprob\":-0,\"greedy\":true}\n"
            "{\"row\":1,\"target\":1,\"logprob\":-0.0078125,\"greedy\":false}\n"
            "{\"row\":2,\"target\":2,\"logprob\":-0.015625,\"greedy\":true}\n");
  EXPECT_THAT(outcome.err, HasSubstr("scored 3 rows"));
  EXPECT_EQ(server_.service().requests()[0].temperature(), 0.5F);
}

TEST_F(CommandTest, ScoreWritesNpyFilesAndFlagsMayHaveUnderscores) {
  const std::string segments = folder_.Write("segments.txt", "0 1 3");

  const Outcome outcome =
      Run({"score", RowsFile(3), "--top_k=2", "--ignore_index", "-1", "--segments", segments,
           "--format", "npy", "--output", folder_.path("out"), "--json"});

  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["rows"], 3);
  EXPECT_THAT(folder_.Read("out/top_k_ids.npy"), HasSubstr("'shape': (3, 2)"));
  EXPECT_THAT(folder_.Read("out/segment_logprob.npy"), HasSubstr("'shape': (2,)"));
}

TEST_F(CommandTest, ScoreTracesItsRequests) {
  const Outcome outcome = Run({"score", RowsFile(3), "--trace", "--traceparent", "00-x"});

  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("\n{\"request\":0,\"received_unix_ns\":0,"));
  EXPECT_EQ(server_.service().traceparent(), "00-x");
}

TEST_F(CommandTest, ScoreNamesABrokenFile) {
  const std::string path = folder_.Write("bad.safetensors", "x");

  const Outcome outcome = Run({"score", path});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr(path), HasSubstr("at least 8 are required")));
}

TEST_F(CommandTest, ScoreReportsTheServersRefusal) {
  server_.service().FailNext({grpc::StatusCode::INVALID_ARGUMENT, "targets[2] is 200"});

  const Outcome outcome = Run({"score", RowsFile(3)});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("INVALID_ARGUMENT: targets[2] is 200"));
  EXPECT_THAT(outcome.out, IsEmpty());
}

TEST_F(CommandTest, SelftestPasses) {
  const Outcome text = Run({"selftest"});
  const Outcome json = Run({"selftest", "--json"});

  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, AllOf(HasSubstr("1.50e-05"), HasSubstr("2.50e-05"), HasSubstr("3.00"),
                              HasSubstr("\nPASS\n")));
  EXPECT_EQ(nlohmann::json::parse(json.out)["passed"], true);
}

TEST_F(CommandTest, SelftestFailsWithAdvice) {
  server_.service().verify().set_passed(false);
  server_.service().verify().set_logit_stddev(0.01);

  const Outcome outcome = Run({"selftest"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.out, HasSubstr("\nFAIL\n"));
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("do not use this server"), HasSubstr("hardly vary")));
}

TEST_F(CommandTest, BenchPrintsATableAndExportsIt) {
  const Outcome outcome =
      Run({"bench", "--rows", "1,16", "--concurrency-range", "1:2", "--requests", "20", "--warmup",
           "1", "--dtype", "f16", "--export", folder_.path("bench.json")});

  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("p99 ms"));
  const auto report = nlohmann::json::parse(folder_.Read("bench.json"));
  ASSERT_EQ(report["results"].size(), 4U);
  EXPECT_EQ(report["results"][3]["rows"], 16);
  EXPECT_EQ(report["results"][3]["concurrency"], 2);
  EXPECT_EQ(report["results"][3]["requests"], 20);
  EXPECT_EQ(server_.service().requests()[0].hidden_size(), 8U);
  EXPECT_EQ(server_.service().requests()[0].dtype(), v1::DTYPE_F16);
}

TEST_F(CommandTest, BenchReportsMachineVersionAndCommandLine) {
  const Outcome outcome = Run({"bench", "--rows", "2", "--requests", "5", "--json"});

  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["server_version"], "9.8.7");
  EXPECT_THAT(report["client_version"].get<std::string>(), Not(IsEmpty()));
  EXPECT_THAT(report["client_cpu"].get<std::string>(), Not(IsEmpty()));
  EXPECT_GE(report["client_cores"], 1);
  EXPECT_THAT(report["command"].get<std::string>(),
              AllOf(HasSubstr("logprobctl bench --address 127.0.0.1:"),
                    HasSubstr(" --rows 2 --requests 5 --json")));
}

TEST_F(CommandTest, BenchReportsTheTransport) {
  const Outcome outcome =
      Run({"bench", "--rows", "2", "--requests", "5", "--transport", "tcp", "--json"});

  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["results"][0]["transport"], "tcp");
  EXPECT_EQ(report["transport_reason"], "transport is tcp");
}

TEST_F(CommandTest, BenchExplainsWhyCudaIpcIsUnavailable) {
  const Outcome outcome = Run({"bench", "--transport", "cuda-ipc", "--gpu", "1000"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("--transport cuda-ipc: "));
}

TEST_F(CommandTest, BenchMeasuresAMixAtARate) {
  const Outcome outcome = Run({"bench", "--rows", "1:3,16:1", "--request-rate", "2000",
                               "--arrivals", "fixed", "--requests", "200", "--json"});

  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto load = nlohmann::json::parse(outcome.out)["results"][0];
  EXPECT_EQ(load["rows"], "1:3,16:1");
  EXPECT_EQ(load["arrivals"], "fixed");
  EXPECT_EQ(load["requests"], 200);
  EXPECT_EQ(load["sizes"][0]["requests"].get<int>() + load["sizes"][1]["requests"].get<int>(), 200);
}

TEST_F(CommandTest, BenchMeasuresUntilItIsStable) {
  const Outcome outcome = Run({"bench", "--rows", "1", "--window", "20ms", "--windows-max", "4",
                               "--stability", "100", "--json"});

  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto load = nlohmann::json::parse(outcome.out)["results"][0];
  EXPECT_TRUE(load["stable"].is_boolean());
  EXPECT_GE(load["windows"].size(), 3U);
  EXPECT_LE(load["windows"].size(), 4U);
}

TEST_F(CommandTest, BenchWritesFreshRowsFromSeveralThreads) {
  const Outcome outcome =
      Run({"bench", "--rows", "16", "--requests", "50", "--fresh", "--writers", "2"});

  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("4 connections"));
}

TEST_F(CommandTest, BenchVerifiesTheServerAndComparesAnswers) {
  const Outcome outcome = Run({"bench", "--rows", "1,4", "--requests", "5", "--verify"});

  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("check before the loads: PASS"), HasSubstr("check after the loads: "),
                    HasSubstr("same row: 0 differ")));
}

TEST_F(CommandTest, BenchSendsNoRowsIfTheServersOwnCheckFails) {
  server_.service().verify().set_passed(false);

  const Outcome outcome = Run({"bench", "--rows", "1", "--requests", "5", "--verify", "--json"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("own check failed before the load"));
  EXPECT_THAT(server_.service().requests(), IsEmpty());
}

TEST_F(CommandTest, BenchReportsWhatItMeasuredIfTheCheckAfterTheLoadsCannotRun) {
  server_.service().FailVerifyAfter(1);

  const Outcome outcome = Run({"bench", "--rows", "1", "--requests", "5", "--verify", "--json"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["results"].size(), 1);
  EXPECT_THAT(outcome.err, HasSubstr("the engine is lost"));
}

TEST_F(CommandTest, BenchFailsIfTheMetricsCannotBeRead) {
  const Outcome outcome = Run({"bench", "--metrics", "127.0.0.1:1"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("cannot read metrics from 127.0.0.1:1"));
}

TEST_F(CommandTest, BenchFailsWhenRequestsFail) {
  server_.service().FailNext({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"});

  const Outcome outcome = Run({"bench", "--rows", "1", "--requests", "5", "--warmup", "0"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("some requests failed, the first with RESOURCE_EXHAUSTED"));
}

TEST_F(CommandTest, BenchChecksItsExportPathsBeforeItSendsRequests) {
  const std::string path = folder_.path("absent/bench.json");

  const Outcome outcome = Run({"bench", "--requests", "1", "--export", path});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("cannot write " + path));
  EXPECT_TRUE(server_.service().requests().empty());
}

TEST_F(CommandTest, BenchListsTheHeadsForAnUnknownName) {
  const Outcome outcome = Run({"bench", "--head", "other"});

  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("there is no head \"other\": the server has fake"));
}

}  // namespace
}  // namespace logprobd::client
