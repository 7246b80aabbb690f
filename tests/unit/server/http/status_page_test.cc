#include "server/http/status_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

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

/// Returns what a reader sees of the body: the texts between tags, a line for each.
std::string TextOf(absl::string_view html) {
  html.remove_prefix(html.find("<body>"));
  std::string text;
  while (!html.empty()) {
    const size_t begin = html.find('<');
    const absl::string_view between = html.substr(0, begin);
    if (between.find_first_not_of(" \n") != absl::string_view::npos) {
      absl::StrAppend(&text, between, "\n");
    }
    html.remove_prefix(begin == absl::string_view::npos ? html.size() : html.find('>', begin) + 1);
  }
  return text;
}

/// Returns the names of the elements that are open at the end or are closed out of order.
std::vector<std::string> UnbalancedElements(absl::string_view html) {
  std::vector<std::string> open;
  for (size_t begin = html.find('<'); begin != absl::string_view::npos;
       begin = html.find('<', begin + 1)) {
    const bool is_end = html[begin + 1] == '/';
    const size_t name_begin = begin + (is_end ? 2 : 1);
    const std::string name(
        html.substr(name_begin, html.find_first_of(" >", name_begin) - name_begin));
    if (name == "!DOCTYPE" || name == "meta" || name == "link") continue;
    if (!is_end) {
      open.push_back(name);
    } else if (open.empty() || open.back() != name) {
      open.push_back("/" + name);
      return open;
    } else {
      open.pop_back();
    }
  }
  return open;
}

/// Returns a page with everything that it can show.
StatusPage FullPage() {
  HeadStatus head = Head("policy");
  head.info.tied = true;
  head.info.has_bias = true;
  head.info.hidden_size = 8;
  head.info.dtype = Dtype::kF32;
  head.info.scale = 0.5F;
  head.info.softcap = 30;
  head.info.weight_bytes = 3 << 20;
  head.info.limits = {.request_rows_max = 64,
                      .message_bytes_max = 2 << 20,
                      .top_k_max = 16,
                      .candidates_max = 256,
                      .segments_max = 32,
                      .stream_window = 4};
  head.info.layout = {{0, 0, "gpu0", 0, 192}, {1, 0, "gpu1", 192, 1'000}, {2, 1, "gpu2", 0, 5}};
  head.is_replica_healthy = {true, false};
  head.requests_per_second = 12;
  head.rows_per_second = 12'000;
  head.faults_per_second = 0.5;
  head.batch_rows_mean = 480;
  head.nonfinite_rows = 1;
  head.queue_rows = 810;
  head.queue_rows_max = 1'000;
  head.queue_requests = 1;
  head.queue_oldest_seconds = 0.25;
  head.latency = {"calls", 1, 0.01, 0.02, 0.04};
  StatusPage page = OneHead(head);
  page.uptime_seconds = 7'500;
  page.received_bytes_per_second = 5 << 20;
  page.sent_bytes_per_second = 1 << 20;
  page.refused_per_second = 0.25;
  page.inflight_bytes = 1 << 20;
  page.inflight_bytes_max = 4 << 20;
  page.stages = {{"kernel", 20, 0.01, 0.02, 0.04}, {"combine"}, {"queue", 10, 1, 2, 3}};
  page.gpus = {{.gpu = 0}, {.gpu = 1, .has_readings = true, .power_watts = 70}};
  page.memory = {{"gpu0",
                  {{"weights", 2 << 20, 2 << 20},
                   {"receive", 9 << 20, 0, /*is_bound=*/true},
                   {"workspace", 1 << 20, 3 << 20},
                   {"strange", 1 << 20}}}};
  page.process = {{"threads", "17"}, {"user", "nobody"}};
  page.warnings = {"one", "two"};
  return page;
}

TEST(StatusPageTest, ShowsEverythingInItsPlace) {
  EXPECT_EQ(TextOf(RenderStatusPage(FullPage(), 5)),
            "logprobd\nready\n1.2.3 (abc)\nmetrics\nhealthz\nreadyz\ntext\n"
            "Rates and latencies cover the last 1 min 0 s. Reloaded every 5 s.\n"
            "Warning:\n one\nWarning:\n two\n"
            // The head.
            "policy\nready\n12,000\nrows/s\n12\ncalls/s\n0.5\nfaults/s\n40 ms\np99 latency\n"
            "480\nrows per batch\n1\nnonfinite rows in total\n7\nweights version\n"
            "Queue\n810 rows of 1 requests, the oldest for 250 ms; at most 1,000 rows\n"
            "Latency\ncalls\ncount\np50\np90\np99\ncalls\n1\n10 ms\n20 ms\n40 ms\n"
            "Layout\nreplica\nshard\ndevice\nids\n0\n0\ngpu0\n0 to 192\nok\n"
            "1\n0\ngpu1\n192 to 1000\nfailed\n2\n1\ngpu2\n0 to 5\n"
            "Head\nmodel type\nqwen3\ntensor\nlm_head.weight (tied)\n"
            "vocabulary\n1000 ids, 1024 rows\nhidden\n8\nweight\nf32, 3.0 MiB\n"
            "bias, scale, cap\nyes, 0.5, 30\nengine\nfake: a test\n"
            "rows per request\nat most 64\nmessage\nat most 2.0 MiB\n"
            "candidates, top-k\nat most 256, 16\nstream window\n4 chunks\n"
            // Stages, GPUs and memory.
            "Latency by stage\nstage\ncount\np50\np90\np99\nkernel\n20\n10 ms\n20 ms\n40 ms\n"
            "combine\n0\nnone in this period\nqueue\n10\n1 s\n2 s\n3 s\n"
            "GPUs\nGPU\nTFLOP/s\nbusy\ndriver's use\npower\nclock\n"
            "0\n0\n0%\nthe driver gives no readings\n1\n0\n0%\n0%\n70 W\n0 MHz\n"
            "Memory\ngpu0, 4.0 MiB\nweights 2.0 MiB\nworkspace 1.0 MiB\nstrange 1.0 MiB\n"
            "weights 2.0 MiB\nreceive 9.0 MiB (at most)\nworkspace 1.0 MiB (peak 3.0 MiB)\n"
            "strange 1.0 MiB\n"
            "Server\n5.0 MiB/s\nreceived\n1.0 MiB/s\nsent\n0.25\nrefused/s\n2 h 5 min\n"
            "running for\nBytes held for requests\n1.0 MiB of at most 4.0 MiB\n"
            "Process\nthreads\n17\nuser\nnobody\n");
}

TEST(StatusPageTest, ShowsZerosForWhatIsNotKnown) {
  StatusPage page;
  page.heads = {HeadStatus()};
  page.gpus = {GpuStatus(), {.has_readings = true}};
  page.stages = {LatencySummary(), {.name = "one", .count = 1}};
  page.memory = {{"host", {MemoryPart()}}};

  EXPECT_EQ(TextOf(RenderStatusPage(page, 0)),
            "logprobd\n ()\nmetrics\nhealthz\nreadyz\ntext\n"
            "Rates and latencies cover the last 0.\n"
            "0\nrows/s\n0\ncalls/s\n0\nfaults/s\n0\np99 latency\n0\nrows per batch\n"
            "0\nnonfinite rows in total\n1\nweights version\n"
            "Queue\n0 rows of 0 requests\n"
            "Latency\ncalls\ncount\np50\np90\np99\n0\nnone in this period\n"
            "Head\nmodel type\ntensor\nvocabulary\n0 ids, 0 rows\nhidden\n0\n"
            "weight\nbf16, 0 B\nbias, scale, cap\nnone, none, none\nengine\n: \n"
            "rows per request\nat most 65536\nmessage\nat most 64.0 MiB\n"
            "candidates, top-k\nat most 1048576, 128\nstream window\n8 chunks\n"
            "Latency by stage\nstage\ncount\np50\np90\np99\n0\nnone in this period\n"
            "one\n1\n0\n0\n0\n"
            "GPUs\nGPU\nTFLOP/s\nbusy\ndriver's use\npower\nclock\n"
            "0\n0\n0%\nthe driver gives no readings\n0\n0\n0%\n0%\n0 W\n0 MHz\n"
            "Memory\nhost, 0 B\n 0 B\n 0 B\n"
            "Server\n0 B/s\nreceived\n0 B/s\nsent\n0\nrefused/s\n0\nrunning for\n"
            "Bytes held for requests\n0 B of at most 0 B\nProcess\n");
}

TEST(StatusPageTest, ClosesEveryElementThatItOpens) {
  EXPECT_THAT(UnbalancedElements(RenderStatusPage(FullPage(), 5)), ::testing::IsEmpty());
  EXPECT_THAT(UnbalancedElements(RenderStatusPage(StatusPage(), 0)), ::testing::IsEmpty());
  EXPECT_THAT(UnbalancedElements("<p><b>x</p></b>"), ::testing::ElementsAre("p", "b", "/p"));
}

TEST(StatusPageTest, MarksWhatIsAnAlarm) {
  StatusPage page = FullPage();
  const auto marks = [&](absl::string_view figure) {
    return absl::StrContains(RenderStatusPage(page, 0),
                             absl::StrCat("<b class=\"alarm\">", figure));
  };
  EXPECT_TRUE(marks("0.5</b><span>faults/s"));
  EXPECT_TRUE(marks("1</b><span>nonfinite rows"));
  EXPECT_TRUE(marks("0.25</b><span>refused/s"));
  EXPECT_TRUE(marks("failed</b>"));

  page.heads[0].faults_per_second = 0;
  page.heads[0].nonfinite_rows = 0;
  page.heads[0].is_replica_healthy = {true, true, true};
  page.refused_per_second = 0;

  EXPECT_FALSE(marks(""));
}

TEST(StatusPageTest, ABadgeHasTheColourOfItsState) {
  StatusPage page = OneHead(Head("policy"));
  const auto badge = [&](ServingState state) {
    page.state = state;
    const std::string html = RenderStatusPage(page, 0);
    const size_t begin = html.find("<span class=\"badge ") + std::string("<span class=\"").size();
    return html.substr(begin, html.find('"', begin) - begin);
  };

  EXPECT_EQ(badge(ServingState::kReady), "badge ready");
  EXPECT_EQ(badge(ServingState::kDegraded), "badge degraded");
  EXPECT_EQ(badge(ServingState::kNotReady), "badge not-ready");
}

TEST(StatusPageTest, DrawsBarsToScale) {
  const std::string html = RenderStatusPage(FullPage(), 0);
  const auto bar = [](const std::string& begin, const std::string& width, const std::string& name) {
    return absl::StrCat("<rect x=\"", begin, "%\" y=\"0\" width=\"", width,
                        "%\" height=\"100%\" class=\"", name, "\">");
  };

  // The bars show the longest latency, 3 s, of the last stage, and its p90 and p50.
  EXPECT_THAT(html, HasSubstr(bar("0.00", "100.00", "c1 light") + "</rect>" +
                              bar("0.00", "66.67", "c1 middle") + "</rect>" +
                              bar("0.00", "33.33", "c1") + "</rect>"));
  EXPECT_THAT(html, HasSubstr(bar("0.00", "1.33", "c1 light")));  // 40 ms
  EXPECT_THAT(html, HasSubstr(bar("0.00", "81.00", "c4")));       // the queue
  EXPECT_THAT(html, HasSubstr(bar("0.00", "25.00", "c2")));       // bytes held
  EXPECT_THAT(html, HasSubstr(bar("0.00", "50.00", "c1") + "<title>weights"));
  EXPECT_THAT(html, HasSubstr(bar("50.00", "25.00", "c2") + "<title>workspace"));
  EXPECT_THAT(html, HasSubstr(bar("75.00", "25.00", "c4") + "<title>strange"));

  StatusPage page = FullPage();
  page.stages = {{"queue", 10, 1, 2, 3}, {"kernel", 20, 0.01, 0.02, 0.04}};
  EXPECT_THAT(RenderStatusPage(page, 0), HasSubstr(bar("0.00", "1.33", "c1 light")));
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
  page.stages = {{evil, 1, 1, 1, 1}};
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
  EXPECT_THAT(RenderStatusPage(page, 1), HasSubstr("<meta http-equiv=\"refresh\" content=\"1\">"));
  EXPECT_THAT(RenderStatusPage(page, 1), HasSubstr("Reloaded every 1 s."));
  EXPECT_THAT(RenderStatusPage(page, 0),
              AllOf(Not(HasSubstr("http-equiv")), Not(HasSubstr("Reloaded"))));
}

TEST(StatusPageTest, DrawsLatenciesAgainstTheLongest) {
  StatusPage page = OneHead(Head("default"));
  page.stages = {{"queue", 10, 0.001, 0.002, 0.004}, {"kernel", 10, 0.01, 0.02, 0.04}};

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
  head.latency = {"scoring", 1'234, 0.0123, 0.02, 1.5};
  StatusPage page = OneHead(head);
  page.stages = {{"queue", 10, 28.5e-6, 0.002, 0.004}, {"combine"}, {"h2d", 1}};

  EXPECT_EQ(RenderLatencyText(page),
            "\n"
            "Latencies of the last 1 min 0 s\n"
            "                               count        p50        p90        p99\n"
            "calls of policy                1,234    12.3 ms      20 ms      1.5 s\n"
            "stage queue                       10    28.5 µs       2 ms       4 ms\n"
            "stage combine                      0   none in this period\n"
            "stage h2d                          1          0          0          0\n");
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
  // Each unit begins exactly where it does.
  EXPECT_EQ(HumanSeconds(0.9994e-3), "999 µs");
  EXPECT_EQ(HumanSeconds(0.9994), "999 ms");
  EXPECT_EQ(HumanSeconds(0.9995), "1 s");
  EXPECT_EQ(HumanSeconds(1), "1 s");
  EXPECT_EQ(HumanSeconds(60), "1 min 0 s");
  EXPECT_EQ(HumanSeconds(3'599), "59 min 59 s");
  EXPECT_EQ(HumanSeconds(3'600), "1 h 0 min");
  EXPECT_EQ(HumanSeconds(86'399), "23 h 59 min");
  EXPECT_EQ(HumanSeconds(86'400), "1 d 0 h");
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
  EXPECT_EQ(HumanNumber(9.54), "9.5");
  EXPECT_EQ(HumanNumber(10.5), "11");
  EXPECT_EQ(HumanNumber(999'999), "999,999");
  EXPECT_EQ(HumanNumber(1'000'000), "1.00 M");
  EXPECT_EQ(HumanNumber(999.99e6), "999.99 M");
  EXPECT_EQ(HumanNumber(1e9), "1.00 G");
}

TEST(HtmlTextTest, FormatsSmallSharesWithOneMoreDigit) {
  EXPECT_EQ(HumanShare(0), "0%");
  EXPECT_EQ(HumanShare(0.0081), "0.8%");
  EXPECT_EQ(HumanShare(0.42), "42%");
  EXPECT_EQ(HumanShare(1), "100%");
  EXPECT_EQ(HumanShare(0.095), "9.5%");
  EXPECT_EQ(HumanShare(0.1), "10%");
}

}  // namespace

}  // namespace logprobd
