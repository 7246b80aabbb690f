#include "client/cli/bench_report.h"

#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/client/cli/temp_folder.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;

LoadResult SomeResult() {
  LoadResult result;
  result.rows = 256;
  result.concurrency = 4;
  result.requests = 1'000;
  result.seconds = 2;
  result.rows_per_second = 128'000;
  result.gigabytes_per_second = 1.048576;
  result.latency = {
      .mean = 0.008, .p50 = 0.007, .p90 = 0.01, .p95 = 0.011, .p99 = 0.02, .max = 0.1};
  return result;
}

TEST(BenchReportTest, PrintsOneLineAResult) {
  std::ostringstream out;

  PrintBenchTable({SomeResult()}, out);

  EXPECT_THAT(out.str(), HasSubstr("rows  concurrency  requests  errors   rows/s   GB/s"));
  EXPECT_THAT(out.str(), HasSubstr("256             4     1,000       0  128,000  1.049   8.000   "
                                   "7.000   10.00   11.00   20.00   100.0\n"));
}

TEST(BenchReportTest, ExportsCsv) {
  const TempFolder folder;

  ASSERT_TRUE(ExportBench(folder.path("b.csv"), {}, {SomeResult()}).ok());

  EXPECT_EQ(folder.Read("b.csv"),
            "rows,concurrency,request_rate,requests,errors,seconds,rows_per_second,"
            "gigabytes_per_second,latency_mean_seconds,latency_p50_seconds,latency_p90_seconds,"
            "latency_p95_seconds,latency_p99_seconds,latency_max_seconds\n"
            "256,4,0,1000,0,2,128000,1.048576,0.008,0.007,0.01,0.011,0.02,0.1\n");
}

TEST(BenchReportTest, ExportsJsonWithTheFacts) {
  const TempFolder folder;

  ASSERT_TRUE(ExportBench(folder.path("b.json"), {{"head", "h"}}, {SomeResult()}).ok());

  const auto report = nlohmann::json::parse(folder.Read("b.json"));
  EXPECT_EQ(report["head"], "h");
  EXPECT_EQ(report["results"][0]["latency_p99_seconds"], 0.02);
  EXPECT_EQ(report["results"][0]["rows"], 256);
}

TEST(BenchReportTest, NamesAPathItCannotWrite) {
  EXPECT_THAT(std::string(ExportBench("/no/such/b.csv", {}, {}).message()),
              HasSubstr("/no/such/b.csv"));
  EXPECT_FALSE(ExportBench("b.txt", {}, {}).ok());
}

}  // namespace
}  // namespace logprobd::client
