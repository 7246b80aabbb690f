#include "client/cli/bench/bench_report.h"

#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/cli/file_bytes.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

/// A load of 1,000 requests in two seconds with latencies of 1 to 10 ms.
BenchLoad SomeLoad(int64_t rows, int64_t concurrency) {
  BenchLoad load;
  load.plan.mix = {.sizes = {{.rows = rows}}};
  load.plan.concurrency = concurrency;
  Interval& measured = load.measurement.measured;
  measured.seconds = 2;
  measured.sizes.resize(1);
  measured.sizes[0].rows = 1'000 * rows;
  measured.sizes[0].transports = {{Transport::kSharedMemory, 1'000}};
  for (int i = 1; i <= 1'000; ++i) measured.sizes[0].latency.Record(i * 1e-5);
  for (int i = 0; i < 3; ++i) {
    load.measurement.windows.push_back({.begin_seconds = i * 0.7,
                                        .seconds = 0.7,
                                        .requests = 333,
                                        .errors = 0,
                                        .rows_per_second = 500.0 * static_cast<double>(rows),
                                        .latency_seconds = 0.005});
  }
  load.measurement.stable = true;
  load.measurement.inflight_max = concurrency;
  return load;
}

/// A mix of two sizes in an open loop, with late sends.
BenchLoad SomeMix() {
  BenchLoad load = SomeLoad(1, 1);
  load.plan.mix = {.sizes = {{.rows = 1, .weight = 80}, {.rows = 256, .weight = 20}}};
  load.plan.request_rate = 500;
  Interval& measured = load.measurement.measured;
  measured.sizes.resize(2);
  measured.sizes[1].rows = 256 * 10;
  measured.sizes[1].transports = {{Transport::kTcp, 10}};
  for (int i = 0; i < 10; ++i) measured.sizes[1].latency.Record(0.25);
  measured.late = {.by_generator = 7,
                   .generator_seconds_max = 0.25,
                   .by_server = 5,
                   .server_seconds_max = 0.5,
                   .unsent = 3};
  load.measurement.stable = false;
  load.measurement.inflight_max = 64;
  return load;
}

ServerFigures SomeServer() {
  ServerFigures server;
  server.seconds = 2;
  server.rows_scored = 256'000;
  server.batches = 100;
  server.batch_rows_mean = 2'560;
  server.stages = {{.name = "queue", .count = 10, .mean_seconds = 0.002},
                   {.name = "kernel", .count = 100, .mean_seconds = 0.004}};
  server.queue_rows_peak = 512;
  server.rejected = {{"queue_rows", 3}};
  server.received_bytes = 2e9;
  server.cpu_seconds = 3;
  server.cpu_seconds_per_gigabyte = 1.5;
  server.resident_bytes_peak = 1 << 30;
  server.gpus = {{.name = "0", .busy_ratio = 0.5, .teraflops = 321}};
  return server;
}

Verification SomeVerification() {
  Verification verification;
  verification.before.passed = true;
  verification.before.rows = 8;
  verification.before.logprob_difference_max = 1.25e-5;
  verification.before.logprob_tolerance = 1e-4;
  verification.before.entropy_difference_max = 2.5e-5;
  verification.before.entropy_tolerance = 2e-4;
  verification.after = verification.before;
  verification.answers.compared = 3;
  return verification;
}

BenchReport SomeReport() {
  BenchReport report;
  report.info = {{"head", "h"}, {"command", "logprobctl bench <x>"}};
  report.row_bytes = 8'192;
  return report;
}

std::string TextOf(const BenchReport& report) {
  std::ostringstream out;
  PrintBenchReport(report, out);
  return out.str();
}

TEST(BenchReportTest, PrintsOneLinePerLoad) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(256, 4)};

  EXPECT_EQ(TextOf(report),
            "rows  concurrency  requests  errors   rows/s   GB/s  avg ms  p50 ms  p90 ms  p95 ms  "
            "p99 ms  p99.9 ms  max ms  stable  transport\n"
            "256             4     1,000       0  128,000  1.049   5.005   5.014   9.044   9.503   "
            "9.961     10.00   10.00     yes        shm\n");
}

TEST(BenchReportTest, PrintsALineForEachSizeOfAMix) {
  BenchReport report = SomeReport();
  report.loads = {SomeMix()};

  const std::vector<std::string> lines = absl::StrSplit(TextOf(report), '\n');

  EXPECT_THAT(lines[1], AllOf(HasSubstr("1:80,256:20"), HasSubstr("500/s"), HasSubstr("1,010"),
                              HasSubstr("no")));
  EXPECT_THAT(lines[2], AllOf(HasSubstr("  of 1 "), HasSubstr(" 1,000 ")));
  EXPECT_THAT(lines[1], HasSubstr("shm+tcp"));
  EXPECT_THAT(lines[3], AllOf(HasSubstr("  of 256 "), HasSubstr(" 10 "), HasSubstr("250.0")));
}

TEST(BenchReportTest, PrintsTheServersFigures) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(256, 4)};
  report.loads[0].server = SomeServer();

  const std::string text = TextOf(report);

  EXPECT_THAT(text,
              HasSubstr("256 rows, 4 in flight      256,000      100      2560.0         512  "
                        "       3   3.00      1.50     1 GiB  0: 50% busy, 321 TFLOP/s\n"));
  EXPECT_THAT(text, HasSubstr("mean ms per stage: queue 2.000 kernel 4.000"));
}

TEST(BenchReportTest, PrintsTheVerification) {
  BenchReport report = SomeReport();
  report.verification = SomeVerification();
  report.verification->answers.compared = 12'345;
  EXPECT_THAT(
      TextOf(report),
      AllOf(HasSubstr("verify: PASS\n"), HasSubstr("check before the loads: PASS: 8 rows"),
            HasSubstr("check after the loads: PASS: 8 rows"),
            HasSubstr("1.25e-05 (tolerance 1e-04)"), HasSubstr("12,345 answered rows compared")));

  report.verification->answers.different = 1;
  report.verification->answers.first_difference = "row 7";
  EXPECT_THAT(TextOf(report), AllOf(HasSubstr("verify: FAIL\n"), HasSubstr("difference: row 7")));
}

TEST(BenchReportTest, FailsTheVerificationIfTheServersCheckFails) {
  Verification verification = SomeVerification();
  EXPECT_TRUE(verification.passed());

  verification.after.passed = false;

  EXPECT_FALSE(verification.passed());
}

TEST(BenchReportTest, FailsTheVerificationIfNoRowWasCompared) {
  Verification verification = SomeVerification();

  verification.answers.compared = 0;

  EXPECT_FALSE(verification.passed());
}

TEST(BenchReportTest, FailsTheVerificationIfAnAnswerIsNotFinite) {
  BenchReport report = SomeReport();
  report.verification = SomeVerification();

  report.verification->answers.nonfinite = 2;

  EXPECT_FALSE(report.verification->passed());
  EXPECT_THAT(TextOf(report), HasSubstr("2 answered rows have a logprob or entropy that is NaN"));
}

TEST(BenchReportTest, WarnsAboutUnstableLoadsAndLateSends) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(1, 1), SomeMix()};

  EXPECT_THAT(BenchWarnings(report),
              ElementsAre(AllOf(HasSubstr("mix 1:80,256:20, 500 requests/s: not stable"),
                                HasSubstr("by more than 10%")),
                          AllOf(HasSubstr("the load generator could not keep up: 7 requests"),
                                HasSubstr("at most 250.0 ms")),
                          AllOf(HasSubstr("can do: 5 requests waited until one of 64"),
                                HasSubstr("3 were never sent"))));
}

TEST(BenchReportTest, WarnsAboutEachWayToExceedTheServer) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(1, 1), SomeLoad(1, 1)};
  report.loads[0].measurement.measured.late.by_server = 5;
  report.loads[1].measurement.measured.late.unsent = 3;

  EXPECT_THAT(BenchWarnings(report),
              ElementsAre(HasSubstr("can do: 5 requests waited"), HasSubstr("3 were never sent")));
}

TEST(BenchReportTest, HasNoWarningForAStableLoad) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(1, 1)};

  EXPECT_THAT(BenchWarnings(report), IsEmpty());
}

TEST(BenchReportTest, ExportsJsonWithEverything) {
  const testing::TempFolder folder;
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(256, 4), SomeMix()};
  report.loads[0].server = SomeServer();
  report.loads[1].measurement.measured.first_error = absl::UnavailableError("gone");
  report.verification = SomeVerification();

  ASSERT_TRUE(ExportBench(folder.path("b.json"), report).ok());

  const auto json = nlohmann::json::parse(folder.Read("b.json"));
  EXPECT_EQ(json["head"], "h");
  const auto& load = json["results"][0];
  EXPECT_EQ(load["rows"], 256);
  EXPECT_EQ(load["concurrency"], 4);
  EXPECT_EQ(load["stable"], true);
  EXPECT_EQ(load["transport"], "shm");
  EXPECT_EQ(load["latency_max_seconds"], 0.01);
  EXPECT_EQ(load["windows"].size(), 3U);
  int64_t count = 0;
  for (const auto& bucket : load["latency_histogram"]) count += bucket[2].get<int64_t>();
  EXPECT_EQ(count, 1'000);
  EXPECT_EQ(load["server"]["stages"][1]["stage"], "kernel");
  EXPECT_EQ(load["server"]["rejected"]["queue_rows"], 3);
  EXPECT_EQ(load["server"]["gpus"][0]["teraflops"], 321);
  const auto& mix = json["results"][1];
  EXPECT_EQ(mix["rows"], "1:80,256:20");
  EXPECT_EQ(mix["arrivals"], "poisson");
  EXPECT_EQ(mix["late_by_generator"], 7);
  EXPECT_EQ(mix["first_error"], "UNAVAILABLE: gone");
  EXPECT_EQ(mix["sizes"][1]["rows"], 256);
  EXPECT_EQ(mix["sizes"][1]["weight"], 20);
  EXPECT_EQ(mix["sizes"][1]["requests"], 10);
  EXPECT_EQ(json["verification"]["passed"], true);
  EXPECT_EQ(json["verification"]["server_after"]["rows"], 8);
}

TEST(BenchReportTest, AnOpenLoopMayBeSlow) {
  const testing::TempFolder folder;
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(256, 4)};
  report.loads[0].plan.request_rate = 0.5;

  ASSERT_TRUE(ExportBench(folder.path("b.json"), report).ok());

  const auto load = nlohmann::json::parse(folder.Read("b.json"))["results"][0];
  EXPECT_EQ(load["request_rate"], 0.5);
  EXPECT_EQ(load["concurrency"], nullptr);
  EXPECT_EQ(load["late_by_generator"], 0);
  EXPECT_THAT(TextOf(report), HasSubstr(" 0.5/s "));
}

TEST(BenchReportTest, NamesAPathItCannotWrite) {
  EXPECT_THAT(std::string(ExportBench("/no/such/b.json", SomeReport()).message()),
              HasSubstr("/no/such/b.json"));
}

TEST(CpuModelOfTest, FindsTheNameOfTheModel) {
  EXPECT_EQ(
      CpuModelOf("processor\t: 0\nmodel\t\t: 143\nmodel name\t: Some CPU @ 2 GHz\nflags\t: x\n"),
      "Some CPU @ 2 GHz");
  EXPECT_EQ(CpuModelOf("processor : 0\n"), "unknown");
}

TEST(MachineJsonTest, ReportsCoresAndDate) {
  const nlohmann::ordered_json machine = MachineJson();

  EXPECT_GE(machine["client_cores"], 1);
  EXPECT_THAT(machine["date"].get<std::string>(),
              MatchesRegex("[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+Z"));
}

TEST(CommandLineTextTest, QuotesArgumentsThatAShellWouldSplit) {
  EXPECT_EQ(CommandLineText({"bench", "--rows", "1:80,2:20", "--head", "a b", "", "it's"}),
            "logprobctl bench --rows 1:80,2:20 --head 'a b' '' 'it'\\''s'");
}

}  // namespace
}  // namespace logprobd::client
