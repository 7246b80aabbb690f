#include "server/http/status_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

HeadStatus Head(const std::string& name) {
  HeadStatus head;
  head.info.name = name;
  head.info.model_type = "qwen3";
  head.info.tensor = "lm_head.weight";
  head.info.engine = "fake";
  head.info.engine_reason = "a test";
  head.info.vocab_size = 1'000;
  head.info.vocab_rows = 1'024;
  head.info.weights_version = 7;
  head.state = ServingState::kReady;
  head.state_text = "ready";
  return head;
}

StatusPage OneHead(const HeadStatus& head) {
  StatusPage page;
  page.version = "1.2.3";
  page.commit = "abc";
  page.state = ServingState::kReady;
  page.state_text = "ready";
  page.window_seconds = 60;
  page.heads = {head};
  return page;
}

TEST(StatusPageTest, NamesVersionStateAndEachHead) {
  StatusPage page = OneHead(Head("policy"));
  page.heads.push_back(Head("reference"));
  page.heads.back().state = ServingState::kNotReady;
  page.heads.back().state_text = "loading";

  const std::string html = RenderStatusPage(page, 0);

  EXPECT_THAT(html, HasSubstr("1.2.3 (abc)"));
  EXPECT_THAT(html, HasSubstr("<title>logprobd: ready</title>"));
  EXPECT_THAT(html, HasSubstr("cover the last 1 min 0 s."));
  EXPECT_THAT(html, HasSubstr("<span>policy</span> <span class=\"badge ready\">ready</span>"));
  EXPECT_THAT(html,
              HasSubstr("<span>reference</span> <span class=\"badge not-ready\">loading</span>"));
  EXPECT_THAT(html, HasSubstr("<b>7</b><span>weights version</span>"));
}

TEST(StatusPageTest, EscapesAllTextFromOutside) {
  const std::string evil = R"(<script>"x"</script>)";
  HeadStatus head = Head(evil);
  head.info.model_type = evil;
  head.info.tensor = evil;
  head.info.engine = evil;
  head.info.engine_reason = evil;
  head.info.layout = {{0, 0, evil, 0, 1'000}};
  head.state_text = evil;
  head.latency.name = evil;
  StatusPage page = OneHead(head);
  page.version = evil;
  page.commit = evil;
  page.state_text = evil;
  page.stages = {{evil, 1, 1, 1, 1, 1}};
  page.gpus = {{.gpu = 0, .has_readings = true, .throttled = {evil}}};
  page.memory = {{evil, {{evil, 1}, {evil, 2, 0, /*is_bound=*/true}}}};
  page.process = {{evil, evil}};
  page.warnings = {evil};

  const std::string html = RenderStatusPage(page, 5);

  EXPECT_THAT(html, AllOf(Not(HasSubstr("<script")), Not(HasSubstr("\"x\""))));
  EXPECT_THAT(html, HasSubstr("&lt;script&gt;&quot;x&quot;&lt;/script&gt;"));
}

TEST(StatusPageTest, LoadsNothingElse) {
  const std::string html = RenderStatusPage(OneHead(Head("default")), 5);

  for (const char* const outside : {"http://", "https://", "src=", "url(", "@import", "<script"}) {
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  }
  EXPECT_THAT(html, HasSubstr("<link rel=\"icon\" href=\"data:,\">"));
}

TEST(StatusPageTest, ReloadsOnRequest) {
  const StatusPage page = OneHead(Head("default"));

  EXPECT_THAT(RenderStatusPage(page, 5), HasSubstr("<meta http-equiv=\"refresh\" content=\"5\">"));
  EXPECT_THAT(RenderStatusPage(page, 0), Not(HasSubstr("http-equiv")));
}

TEST(StatusPageTest, DrawsLatenciesAgainstTheLongest) {
  StatusPage page = OneHead(Head("default"));
  page.stages = {{"queue", 10, 0.001, 0.001, 0.002, 0.004}, {"kernel", 10, 0.01, 0.01, 0.02, 0.04}};

  const std::string html = RenderStatusPage(page, 0);

  EXPECT_THAT(html, HasSubstr("<td>queue</td><td class=\"number wide\">10</td>"
                              "<td class=\"number\">1 ms</td><td class=\"number\">2 ms</td>"
                              "<td class=\"number\">4 ms</td>"));
  EXPECT_THAT(html, HasSubstr(R"(width="10.00%" height="100%" class="c1 light">)"));
  EXPECT_THAT(html, HasSubstr(R"(width="100.00%" height="100%" class="c1 light">)"));
  EXPECT_THAT(html, HasSubstr(R"(width="25.00%" height="100%" class="c1">)"));
}

TEST(StatusPageTest, SaysWhenNothingWasMeasured) {
  StatusPage page = OneHead(Head("default"));
  page.stages = {{"combine"}};
  page.gpus = {{.gpu = 3}};

  const std::string html = RenderStatusPage(page, 0);

  EXPECT_THAT(html, HasSubstr("<td>combine</td><td class=\"number wide\">0</td>"
                              "<td class=\"soft\" colspan=\"4\">none in this period</td>"));
  EXPECT_THAT(html, HasSubstr("the driver gives no readings"));
}

TEST(StatusPageTest, ShowsTheLatenciesOfHeadsAndStagesAsText) {
  HeadStatus head = Head("policy");
  head.latency = {"scoring", 1'234, 0.01, 0.0123, 0.02, 1.5};
  StatusPage page = OneHead(head);
  page.stages = {{"queue", 10, 28.5e-6, 28.5e-6, 0.002, 0.004}, {"combine"}};

  EXPECT_EQ(RenderLatencyText(page),
            "\n"
            "Latencies of the last 1 min 0 s\n"
            "                               count        p50        p90        p99\n"
            "calls of policy                1,234    12.3 ms      20 ms      1.5 s\n"
            "stage queue                       10    28.5 µs       2 ms       4 ms\n"
            "stage combine                      0   none in this period\n");
}

TEST(StatusPageTest, DrawsMemoryToScaleWithoutUpperBounds) {
  StatusPage page = OneHead(Head("default"));
  page.memory = {{"host",
                  {{"weights", 300 << 20},
                   {"staging", 100 << 20},
                   {"receive", 900 << 20, 0, /*is_bound=*/true}}},
                 {"gpu0", {{"other", 1 << 20, 3 << 20}, {"free", 3 << 20}}}};

  const std::string html = RenderStatusPage(page, 0);

  EXPECT_THAT(html, HasSubstr("<h3>host, 400.0 MiB</h3>"));
  EXPECT_THAT(html, HasSubstr(R"(x="0.00%" y="0" width="75.00%" height="100%" class="c1">)"));
  EXPECT_THAT(html, HasSubstr(R"(x="75.00%" y="0" width="25.00%" height="100%" class="c3">)"));
  EXPECT_THAT(html, HasSubstr("receive 900.0 MiB (at most)"));
  EXPECT_THAT(html, HasSubstr("other 1.0 MiB (peak 3.0 MiB)"));
}

TEST(StatusPageTest, ShowsTheQueueAgainstItsLimit) {
  HeadStatus head = Head("default");
  head.queue_rows = 750;
  head.queue_rows_max = 1'000;
  head.queue_requests = 3;
  head.queue_oldest_seconds = 0.25;

  const std::string html = RenderStatusPage(OneHead(head), 0);

  EXPECT_THAT(html, HasSubstr("750 rows of 3 requests, the oldest for 250 ms; at most 1,000 rows"));
  EXPECT_THAT(html, HasSubstr(R"(aria-label="queue 75% full")"));
}

TEST(StatusPageTest, MarksAFailedReplica) {
  HeadStatus head = Head("default");
  head.info.layout = {{0, 0, "gpu0", 0, 1'000}, {1, 0, "gpu1", 0, 1'000}};
  head.is_replica_healthy = {true, false};

  const std::string html = RenderStatusPage(OneHead(head), 0);

  EXPECT_THAT(html, HasSubstr("<td>gpu0</td><td class=\"number\">0 to 1000</td>"
                              "<td class=\"number\">ok</td>"));
  EXPECT_THAT(html, HasSubstr("<td>gpu1</td><td class=\"number\">0 to 1000</td>"
                              "<td class=\"number\"><b class=\"alarm\">failed</b></td>"));
}

TEST(StatusPageTest, ShowsTheDriversReadingsOfAGpu) {
  StatusPage page = OneHead(Head("default"));
  page.gpus = {{.gpu = 1,
                .has_readings = true,
                .utilization_ratio = 0.97,
                .power_watts = 689.5,
                .sm_clock_hertz = 1.455e9,
                .throttled = {"power_cap", "thermal"},
                .tflops_per_second = 540,
                .busy_ratio = 0.9}};

  const std::string html = RenderStatusPage(page, 0);

  for (const char* const cell :
       {">540<", ">90%<", ">97%<", ">690 W<", ">1455 MHz<", ">power_cap, thermal<"}) {
    EXPECT_THAT(html, HasSubstr(cell));
  }
}

}  // namespace

namespace {

TEST(HtmlTextTest, EscapesCharactersWithAMeaningInHtml) {
  EXPECT_EQ(EscapeHtml(R"(<a b="c" d='e'>&amp;)"),
            "&lt;a b=&quot;c&quot; d=&#39;e&#39;&gt;&amp;amp;");
  EXPECT_EQ(EscapeHtml("modèle 模型"), "modèle 模型");
}

TEST(HtmlTextTest, FormatsDurationsWithThreeDigitsInASuitableUnit) {
  EXPECT_EQ(HumanSeconds(0), "0");
  EXPECT_EQ(HumanSeconds(28.54e-6), "28.5 µs");
  EXPECT_EQ(HumanSeconds(999.9e-6), "1 ms");
  EXPECT_EQ(HumanSeconds(0.0123), "12.3 ms");
  EXPECT_EQ(HumanSeconds(0.9999), "1 s");
  EXPECT_EQ(HumanSeconds(59.4), "59.4 s");
  EXPECT_EQ(HumanSeconds(200), "3 min 20 s");
  EXPECT_EQ(HumanSeconds(7'500), "2 h 5 min");
  EXPECT_EQ(HumanSeconds(273'600), "3 d 4 h");
}

TEST(HtmlTextTest, GroupsLargeNumbersAndShortensHugeOnes) {
  EXPECT_EQ(HumanNumber(0), "0");
  EXPECT_EQ(HumanNumber(0.25), "0.25");
  EXPECT_EQ(HumanNumber(7.54), "7.5");
  EXPECT_EQ(HumanNumber(10), "10");
  EXPECT_EQ(HumanNumber(999.6), "1,000");
  EXPECT_EQ(HumanNumber(123'456), "123,456");
  EXPECT_EQ(HumanNumber(1'250'000), "1.25 M");
  EXPECT_EQ(HumanNumber(3.1e9), "3.10 G");
}

TEST(HtmlTextTest, FormatsSmallSharesWithOneMoreDigit) {
  EXPECT_EQ(HumanShare(0), "0%");
  EXPECT_EQ(HumanShare(0.0081), "0.8%");
  EXPECT_EQ(HumanShare(0.42), "42%");
  EXPECT_EQ(HumanShare(1), "100%");
}

}  // namespace

}  // namespace logprobd
