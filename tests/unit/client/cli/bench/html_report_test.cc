#include "client/cli/bench/html_report.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/client/cli/bench/report_case.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(HtmlReportTest, ShowsASingleLoadOverTime) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(256, 4)};

  const std::string html = BenchHtml(report);

  EXPECT_THAT(html, AllOf(HasSubstr("Throughput over time"), HasSubstr("Latency over time"),
                          HasSubstr("Latency by percentile"), HasSubstr("Latency histogram")));
  EXPECT_THAT(html, AllOf(Not(HasSubstr("against load")), Not(HasSubstr("Server stages"))));
}

TEST(HtmlReportTest, ShowsSeveralLoadsAgainstEachOther) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(256, 1), SomeLoad(256, 4), SomeLoad(8'192, 1), SomeLoad(8'192, 4)};

  const std::string html = BenchHtml(report);

  EXPECT_THAT(html, AllOf(HasSubstr("Throughput against load"), HasSubstr("Latency against load"),
                          HasSubstr("requests in flight"), HasSubstr("8192 rows, p99")));
}

TEST(HtmlReportTest, ShowsTheServer) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(256, 1)};
  report.loads[0].server = SomeServer();

  const std::string html = BenchHtml(report);

  EXPECT_THAT(html, AllOf(HasSubstr("Server stages"),
                          HasSubstr("<title>kernel, 256 rows, 1 in flight: 4 ms</title>"),
                          HasSubstr("0: 50% busy, 321 TFLOP/s")));
}

TEST(HtmlReportTest, ShowsWarningsAndTheSizesOfAMix) {
  BenchReport report = SomeReport();
  report.loads = {SomeMix()};

  const std::string html = BenchHtml(report);

  EXPECT_THAT(html, AllOf(HasSubstr("not stable"), HasSubstr("of 256 rows"),
                          HasSubstr("mix 1:80,256:20, 500 requests/s")));
}

TEST(HtmlReportTest, ShowsTheVerification) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(1, 1)};
  report.verification = Verification{.rows = 64, .first_difference = {}};
  EXPECT_THAT(BenchHtml(report), AllOf(HasSubstr(">PASS<"), HasSubstr("all bits equal")));

  report.verification->answers_different = 2;
  report.verification->first_difference = "row <7>";
  EXPECT_THAT(BenchHtml(report), AllOf(HasSubstr(">FAIL<"), HasSubstr("row &lt;7&gt;")));
}

TEST(HtmlReportTest, LoadsNothingAndRunsNothing) {
  BenchReport report = SomeReport();
  report.loads = {SomeLoad(256, 1), SomeMix()};

  const std::string html = BenchHtml(report);

  for (const char* outside : {"http:", "https:", "<script", "<link", "<img", "@import", "url("}) {
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  }
  EXPECT_THAT(html, AllOf(HasSubstr("prefers-color-scheme:dark"), HasSubstr("width=device-width"),
                          HasSubstr("logprobctl bench &lt;x&gt;"), HasSubstr("</html>")));
}

TEST(HtmlReportTest, ShowsLoadsWithoutAnyAnswer) {
  BenchReport report = SomeReport();
  report.loads.resize(2);
  report.loads[0].plan.mix = report.loads[1].plan.mix = {.sizes = {{.rows = 1}}};

  const std::string html = BenchHtml(report);

  EXPECT_THAT(html, AllOf(HasSubstr("</html>"), Not(HasSubstr("nan"))));
}

TEST(HtmlReportTest, DrawsAtMostEightLines) {
  BenchReport report = SomeReport();
  for (int64_t concurrency = 1; concurrency <= 20; ++concurrency) {
    report.loads.push_back(SomeLoad(256, concurrency));
  }

  EXPECT_THAT(BenchHtml(report), HasSubstr("8 of 20 loads."));
}

}  // namespace
}  // namespace logprobd::client
