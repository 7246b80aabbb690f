#include "server/metrics/metrics.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "server/base/log.h"
#include "server/metrics/nvml.h"
#include "tests/support/few_files.h"
#include "tests/support/full_stderr.h"
#include "tests/support/temp_folder.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Metrics::Options OneHead() {
  return {.heads = {"default"}, .version = "1.2.3", .commit = "abc", .grpc = "1.51.1"};
}

Metrics::Options WithGpus(const std::vector<int>& gpus) {
  Metrics::Options options = OneHead();
  options.gpus = gpus;
  return options;
}

HeadInfo Head(const std::string& name, const std::string& model_type, uint64_t version) {
  HeadInfo info;
  info.name = name;
  info.model_type = model_type;
  info.weights_version = version;
  return info;
}

std::vector<std::string> Families(const Metrics& metrics) {
  std::vector<std::string> names;
  for (const std::string& line :
       std::vector<std::string>(absl::StrSplit(metrics.Serialize(), '\n'))) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words.size() == 4 && words[1] == "TYPE") {
      names.push_back(absl::StrCat(words[2], " ", words[3]));
    }
  }
  return names;
}

size_t CountSeries(const Metrics& metrics) {
  size_t count = 0;
  for (const std::string& line :
       std::vector<std::string>(absl::StrSplit(metrics.Serialize(), '\n'))) {
    count += line.empty() || absl::StartsWith(line, "#") ? 0 : 1;
  }
  return count;
}

TEST(MetricsTest, ExposesEveryFamilyFromTheFirstScrape) {
  const Metrics metrics(OneHead());

  EXPECT_THAT(
      Families(metrics),
      ElementsAre(
          "logprobd_batch_requests histogram", "logprobd_batch_rows histogram",
          "logprobd_build_info gauge", "logprobd_cancelled_total counter",
          "logprobd_cuda_ipc_mappings gauge", "logprobd_deadline_exceeded_total counter",
          "logprobd_host_memory_bytes gauge", "logprobd_inflight_bytes gauge",
          "logprobd_inflight_bytes_limit gauge", "logprobd_log_lines_lost_total counter",
          "logprobd_queue_bytes gauge", "logprobd_queue_oldest_age_seconds gauge",
          "logprobd_queue_requests gauge", "logprobd_queue_rows gauge", "logprobd_ready gauge",
          "logprobd_received_bytes_total counter", "logprobd_rejected_total counter",
          "logprobd_replicas gauge", "logprobd_request_duration_seconds histogram",
          "logprobd_requests_total counter", "logprobd_rows_total counter",
          "logprobd_sent_bytes_total counter", "logprobd_shm_bytes gauge",
          "logprobd_shm_regions gauge", "logprobd_stage_duration_seconds histogram",
          "logprobd_tls_refused_certificates_total counter", "logprobd_tls_reloads_total counter",
          "logprobd_weights_load_duration_seconds histogram",
          "logprobd_weights_swaps_total counter", "logprobd_weights_version gauge",
          "process_cpu_seconds_total counter", "process_max_fds gauge", "process_open_fds gauge",
          "process_resident_memory_bytes gauge", "process_start_time_seconds gauge",
          "process_virtual_memory_bytes gauge"));
}

TEST(MetricsTest, CountsTheLinesOfTheLogThatAreLost) {
  const Metrics metrics(OneHead());
  EXPECT_THAT(metrics.Serialize(), HasSubstr("logprobd_log_lines_lost_total{kind=\"audit\"} 0\n"
                                             "logprobd_log_lines_lost_total{kind=\"log\"} 0\n"));
  {
    const testing::FullStderr full;
    LogError("one");
    LogError("two");
    LogAudit(LogLevel::kInfo, {});
  }
  EXPECT_THAT(metrics.Serialize(), HasSubstr("logprobd_log_lines_lost_total{kind=\"audit\"} 1\n"
                                             "logprobd_log_lines_lost_total{kind=\"log\"} 2\n"));
}

TEST(MetricsTest, AddsTheGpuFamiliesWhenThereIsAGpu) {
  const Metrics without(OneHead());
  const Metrics with(WithGpus({0}));

  std::vector<std::string> added = Families(with);
  for (const std::string& name : Families(without)) {
    std::erase(added, name);
  }

  EXPECT_THAT(
      added,
      ElementsAre("logprobd_flops_total counter", "logprobd_gpu_busy_seconds_total counter",
                  "logprobd_gpu_ecc_errors_total counter", "logprobd_gpu_errors_total counter",
                  "logprobd_gpu_memory_bytes gauge", "logprobd_gpu_memory_peak_bytes gauge",
                  "logprobd_gpu_nvml_up gauge", "logprobd_gpu_power_watts gauge",
                  "logprobd_gpu_sm_clock_hertz gauge", "logprobd_gpu_throttled gauge",
                  "logprobd_gpu_unequal_sums gauge", "logprobd_gpu_utilization_ratio gauge",
                  "logprobd_host_pinned_bytes gauge"));
}

TEST(MetricsTest, AddsCollectiveErrorsWhenThereAreSeveralGpus) {
  const Metrics one(WithGpus({0}));
  const Metrics several(WithGpus({3, 1}));

  std::vector<std::string> added = Families(several);
  for (const std::string& name : Families(one)) {
    std::erase(added, name);
  }

  EXPECT_THAT(added, ElementsAre("logprobd_collective_errors_total counter"));
  for (const char* gpu : {"1", "3"}) {
    for (const char* kind : {"nccl", "peer", "timeout", "other"}) {
      EXPECT_THAT(several.Serialize(),
                  HasSubstr(absl::StrCat("logprobd_collective_errors_total{gpu=\"", gpu,
                                         "\",kind=\"", kind, "\"} 0\n")));
    }
  }
}

/// Returns what the help of a metric must contain to state its unit.
std::string UnitOf(const std::string& name) {
  const std::string base = absl::StrReplaceAll(name, {{"_total", ""}});
  for (const char* const unit : {"seconds", "bytes", "watts", "hertz"}) {
    if (absl::EndsWith(base, unit) || absl::EndsWith(base, absl::StrCat(unit, "_limit"))) {
      return absl::StrCat("in ", unit);
    }
  }
  if (absl::EndsWith(base, "_ratio")) {
    return "0 to 1";
  }
  return base == name ? "" : "Number of ";
}

TEST(MetricsTest, DescribesEveryFamilyByASentenceThatStatesTheUnit) {
  const std::string text = Metrics(WithGpus({0, 1})).Serialize();
  int num_families = 0;

  for (const std::string& line : std::vector<std::string>(absl::StrSplit(text, '\n'))) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 3));
    if (parts.size() < 4 || parts[1] != "HELP") {
      continue;
    }
    const std::string& help = parts[3];
    EXPECT_TRUE(absl::ascii_isupper(static_cast<unsigned char>(help.front())) ||
                help.front() == '1')
        << line;
    EXPECT_EQ(help.back(), '.') << line;
    EXPECT_THAT(help, HasSubstr(UnitOf(parts[2])));
    ++num_families;
  }

  EXPECT_EQ(static_cast<size_t>(num_families), Families(Metrics(WithGpus({0, 1}))).size());
}

TEST(MetricsTest, StartsLabelSetsAtZero) {
  const std::string text = Metrics(OneHead()).Serialize();

  for (
      const char* series :
      {R"(logprobd_requests_total{code="OK",head="default",method="Score"} 0)",
       R"(logprobd_requests_total{code="RESOURCE_EXHAUSTED",head="unknown",method="ScoreStream"} 0)",
       R"(logprobd_rows_total{head="default",kind="nonfinite"} 0)",
       R"(logprobd_queue_rows{head="default",priority="low"} 0)",
       R"(logprobd_rejected_total{reason="client_share"} 0)",
       R"(logprobd_cancelled_total{stage="engine"} 0)",
       R"(logprobd_received_bytes_total{transport="shm"} 0)",
       R"(logprobd_stage_duration_seconds_count{stage="d2h"} 0)",
       R"(logprobd_ready{head="default"} 0)",
       R"(logprobd_replicas{head="default",state="failed"} 0)", "logprobd_shm_regions 0",
       "logprobd_shm_bytes 0", "logprobd_cuda_ipc_mappings 0",
       R"(logprobd_weights_swaps_total{head="default",result="committed"} 0)",
       R"(logprobd_weights_swaps_total{head="default",result="failed"} 0)",
       R"(logprobd_weights_version{head="default"} 0)"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(series, "\n")));
  }
}

TEST(MetricsTest, UsesTheDocumentedBuckets) {
  const std::string text = Metrics(OneHead()).Serialize();

  EXPECT_THAT(text, HasSubstr(R"(stage_duration_seconds_bucket{stage="queue",le="5e-05"} 0)"));
  EXPECT_THAT(text, HasSubstr(R"(stage_duration_seconds_bucket{stage="queue",le="7.5e-05"} 0)"));
  EXPECT_THAT(text,
              HasSubstr(R"(stage_duration_seconds_bucket{stage="queue",le="32.3579912455"} 0)"));
  EXPECT_THAT(text, HasSubstr(R"(batch_rows_bucket{head="default",le="1"} 0)"));
  EXPECT_THAT(text, HasSubstr(R"(batch_rows_bucket{head="default",le="1048576"} 0)"));
  EXPECT_THAT(text, HasSubstr(R"(batch_rows_bucket{head="default",le="+Inf"} 0)"));
}

TEST(MetricsTest, PrintsEveryBoundWithAtMost12Digits) {
  const std::string text = Metrics(OneHead()).Serialize();
  const std::regex bound("[{,]le=\"([^\"]*)\"");
  int num_bounds = 0;

  for (std::sregex_iterator match(text.begin(), text.end(), bound), end; match != end; ++match) {
    const std::string printed = (*match)[1];
    const std::string digits =
        absl::StrReplaceAll(printed.substr(0, printed.find('e')), {{".", ""}});
    EXPECT_LE(digits.substr(std::min(digits.find_first_not_of('0'), digits.size())).size(), 12U)
        << printed;
    ++num_bounds;
  }

  EXPECT_GT(num_bounds, 100);
}

TEST(MetricsTest, LeavesAHeadNameThatLooksLikeABoundAsItIs) {
  const std::string text = Metrics({.heads = {R"(a,le="0.50000000000000001")"}}).Serialize();

  EXPECT_THAT(text, HasSubstr(R"(head="a,le=\"0.50000000000000001\"")"));
}

TEST(MetricsTest, CountsWhatIsRecorded) {
  Metrics metrics(OneHead());

  metrics.RecordRequest(Metrics::Method::kScore, "default", absl::StatusCode::kOk, 0.01,
                        Metrics::Transport::kTcp);
  metrics.RecordStage(Metrics::Stage::kKernel, 0.25);
  metrics.RecordRows("default", 10, 2, 1);
  metrics.RecordBatch("default", 512, 3);
  metrics.RecordRejection(Metrics::Rejection::kQueueBytes);
  metrics.RecordCancelled(Metrics::LeftAt::kQueue);
  metrics.RecordDeadlineExceeded(Metrics::LeftAt::kArrival);
  metrics.RecordReceived(Metrics::Transport::kTcp, 4'096);
  metrics.RecordSent(Metrics::Transport::kTcp, 128);
  metrics.SetQueue("default", Priority::kHigh, {.rows = 7, .bytes = 70, .requests = 2});
  metrics.SetQueueOldestAge("default", 1.5);
  metrics.SetQueue("default", Priority::kLow, {.rows = 1, .bytes = 30, .requests = 1});
  metrics.SetInflightBytesLimit(1'000);
  metrics.SetReady("default", true);
  metrics.SetReplicas("default", 3, 1);
  metrics.RecordWeightsLoad("default", 2.5);
  metrics.RecordWeightsSwap("default", Metrics::WeightsSwap::kCommitted);
  metrics.RecordWeightsSwap("default", Metrics::WeightsSwap::kRolledBack);
  metrics.RecordWeightsSwap("default", Metrics::WeightsSwap::kRolledBack);
  metrics.RecordWeightsSwap("default", Metrics::WeightsSwap::kCancelled);
  metrics.RecordWeightsSwap("no such head", Metrics::WeightsSwap::kFailed);
  metrics.SetShmRegions(2, 4'096);
  metrics.SetCudaIpcMappings(3);
  metrics.SetMemory({{"host", "weights", 11}, {"host", "staging", 22}, {"gpu0", "weights", 33}});

  const std::string text = metrics.Serialize();
  for (
      const char* series :
      {R"(logprobd_requests_total{code="OK",head="default",method="Score"} 1)",
       R"(logprobd_request_duration_seconds_count{head="default",method="Score",transport="tcp"} 1)",
       R"(logprobd_stage_duration_seconds_sum{stage="kernel"} 0.25)",
       R"(logprobd_rows_total{head="default",kind="scored"} 10)",
       R"(logprobd_rows_total{head="default",kind="ignored"} 2)",
       R"(logprobd_rows_total{head="default",kind="nonfinite"} 1)",
       R"(logprobd_batch_rows_bucket{head="default",le="512"} 1)",
       R"(logprobd_batch_requests_sum{head="default"} 3)",
       R"(logprobd_rejected_total{reason="queue_bytes"} 1)",
       R"(logprobd_weights_swaps_total{head="default",result="committed"} 1)",
       R"(logprobd_weights_swaps_total{head="default",result="rolled_back"} 2)",
       R"(logprobd_weights_swaps_total{head="default",result="failed"} 0)",
       R"(logprobd_weights_swaps_total{head="default",result="cancelled"} 1)",
       "logprobd_shm_regions 2",
       "logprobd_shm_bytes 4096",
       "logprobd_cuda_ipc_mappings 3",
       R"(logprobd_cancelled_total{stage="queue"} 1)",
       R"(logprobd_deadline_exceeded_total{stage="arrival"} 1)",
       R"(logprobd_received_bytes_total{transport="tcp"} 4096)",
       R"(logprobd_sent_bytes_total{transport="tcp"} 128)",
       R"(logprobd_queue_rows{head="default",priority="high"} 7)",
       R"(logprobd_queue_bytes{head="default",priority="high"} 70)",
       R"(logprobd_queue_requests{head="default",priority="high"} 2)",
       R"(logprobd_queue_oldest_age_seconds{head="default"} 1.5)",
       "logprobd_inflight_bytes 100",
       "logprobd_inflight_bytes_limit 1000",
       R"(logprobd_ready{head="default"} 1)",
       R"(logprobd_replicas{head="default",state="healthy"} 3)",
       R"(logprobd_replicas{head="default",state="failed"} 1)",
       R"(logprobd_weights_load_duration_seconds_count{head="default"} 1)",
       R"(logprobd_host_memory_bytes{kind="weights"} 11)",
       R"(logprobd_host_memory_bytes{kind="staging"} 22)",
       R"(logprobd_build_info{commit="abc",grpc="1.51.1",version="1.2.3"} 1)"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(series, "\n")));
  }
}

TEST(MetricsTest, CountsEachMethodAndEachTransportUnderItsName) {
  Metrics metrics({.heads = {"default", "other"}});

  metrics.RecordRequest(Metrics::Method::kScoreStream, "default", absl::StatusCode::kOk, 0.5,
                        Metrics::Transport::kTcp);
  metrics.RecordRequest(Metrics::Method::kVerify, "other", absl::StatusCode::kOk, 2,
                        Metrics::Transport::kCudaIpc);
  metrics.RecordRequest(Metrics::Method::kListHeads, "", absl::StatusCode::kOk, 4,
                        Metrics::Transport::kShm);

  const std::string text = metrics.Serialize();
  for (const char* series :
       {R"(requests_total{code="OK",head="default",method="ScoreStream"} 1)",
        R"(requests_total{code="OK",head="default",method="Score"} 0)",
        R"(requests_total{code="OK",head="other",method="Verify"} 1)",
        R"(requests_total{code="OK",head="unknown",method="ListHeads"} 1)",
        R"(duration_seconds_sum{head="default",method="ScoreStream",transport="tcp"} 0.5)",
        R"(duration_seconds_count{head="default",method="Score",transport="tcp"} 0)",
        R"(duration_seconds_sum{head="other",method="Verify",transport="cuda_ipc"} 2)",
        R"(duration_seconds_sum{head="unknown",method="ListHeads",transport="shm"} 4)"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(series, "\n")));
  }
}

TEST(MetricsTest, CountsEachReasonStageAndTransportUnderItsName) {
  Metrics metrics(OneHead());
  // The value of number i is counted i + 1 times.
  const auto count = [](int num_values, const auto& record) {
    for (int value = 0; value < num_values; ++value) {
      for (int times = 0; times <= value; ++times) record(value);
    }
  };
  count(11, [&](int i) { metrics.RecordRejection(static_cast<Rejection>(i)); });
  count(3, [&](int i) { metrics.RecordCancelled(static_cast<Metrics::LeftAt>(i)); });
  count(3, [&](int i) { metrics.RecordDeadlineExceeded(static_cast<Metrics::LeftAt>(i)); });
  count(3, [&](int i) { metrics.RecordReceived(static_cast<Metrics::Transport>(i), 1); });
  count(3, [&](int i) { metrics.RecordSent(static_cast<Metrics::Transport>(i), 10); });
  count(8, [&](int i) { metrics.RecordStage(static_cast<Metrics::Stage>(i), 1); });
  count(5,
        [&](int i) { metrics.RecordWeightsSwap("default", static_cast<Metrics::WeightsSwap>(i)); });

  const MetricsSnapshot counts = metrics.Snapshot();
  const auto expect = [&](const std::string& family, const std::string& label,
                          const std::vector<std::string>& names, double step = 1) {
    for (size_t i = 0; i < names.size(); ++i) {
      EXPECT_EQ(counts.Sum(family, {{label, names[i]}}), step * static_cast<double>(i + 1))
          << family << " " << names[i];
    }
  };
  expect("logprobd_rejected_total", "reason",
         {"queue_rows", "queue_bytes", "queue_requests", "client_share", "deadline", "draining",
          "not_ready", "invalid", "answer_bytes", "unauthenticated", "permission_denied"});
  expect("logprobd_cancelled_total", "stage", {"arrival", "queue", "engine"});
  expect("logprobd_deadline_exceeded_total", "stage", {"arrival", "queue", "engine"});
  expect("logprobd_received_bytes_total", "transport", {"tcp", "shm", "cuda_ipc"});
  expect("logprobd_sent_bytes_total", "transport", {"tcp", "shm", "cuda_ipc"}, 10);
  expect("logprobd_weights_swaps_total", "result",
         {"committed", "rolled_back", "failed", "cancelled", "discarded"});
  int num_stages = 0;
  for (const char* const stage :
       {"receive", "copy", "queue", "h2d", "kernel", "combine", "d2h", "reply"}) {
    EXPECT_EQ(counts.Histogram("logprobd_stage_duration_seconds", {{"stage", stage}}).count(),
              ++num_stages)
        << stage;
  }
}

TEST(MetricsTest, CountsACodeThatGrpcDoesNotHaveAsUnknown) {
  Metrics metrics(OneHead());

  for (const int code : {0, 16, 17, 99}) {
    metrics.RecordRequest(Metrics::Method::kScore, "default", static_cast<absl::StatusCode>(code),
                          0.001, Metrics::Transport::kTcp);
  }

  const std::string text = metrics.Serialize();
  for (const char* series : {R"({code="OK",head="default",method="Score"} 1)",
                             R"({code="UNAUTHENTICATED",head="default",method="Score"} 1)",
                             R"({code="UNKNOWN",head="default",method="Score"} 2)"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("logprobd_requests_total", series, "\n")));
  }
}

TEST(MetricsTest, PrintsTheSeriesOfAFamilyInTheOrderOfTheirLabels) {
  const std::string text = Metrics({.heads = {"c", "a", "d", "b"}}).Serialize();
  std::vector<std::string> series;

  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::StartsWith(line, "logprobd_queue_rows{")) series.emplace_back(line);
  }

  EXPECT_EQ(series.size(), 12U);
  EXPECT_TRUE(std::is_sorted(series.begin(), series.end()));
}

TEST(MetricsTest, AHeadIsNotReadyAnyMore) {
  Metrics metrics(OneHead());
  metrics.SetReady("default", true);

  metrics.SetReady("default", false);

  EXPECT_THAT(metrics.Serialize(), HasSubstr("logprobd_ready{head=\"default\"} 0\n"));
}

TEST(MetricsTest, AddsTheMemoryOfAKindInAPlace) {
  Metrics metrics(WithGpus({0}));

  metrics.SetMemory({{"host", "receive", 1},
                     {"host", "receive", 2},
                     {"host", "staging", 30},
                     {"host", "staging", 40},
                     {"gpu0", "receive", 5'000},
                     {"gpu0", "weights", 100},
                     {"gpu0", "weights", 200},
                     {"gpu0", "staging", 60},
                     {"gpu0", "shared", 7}});

  const std::string text = metrics.Serialize();
  for (const char* series : {R"(logprobd_host_memory_bytes{kind="receive"} 3)",
                             R"(logprobd_host_memory_bytes{kind="staging"} 70)",
                             R"(logprobd_host_memory_bytes{kind="weights"} 0)",
                             R"(logprobd_host_pinned_bytes{state="used"} 70)",
                             R"(logprobd_gpu_memory_bytes{gpu="0",kind="weights"} 300)",
                             R"(logprobd_gpu_memory_bytes{gpu="0",kind="staging"} 60)",
                             R"(logprobd_gpu_memory_bytes{gpu="0",kind="workspace"} 0)"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(series, "\n")));
  }
}

TEST(MetricsTest, CountsOnlyForTheGpusItKnows) {
  Metrics metrics(WithGpus({0}));

  metrics.RecordFlops(0, 1e12, 0.5);
  metrics.RecordFlops(1, 1e12, 0.5);
  metrics.RecordGpuError(0, "cuda");
  metrics.RecordGpuError(0, "a kind that nobody knows");
  metrics.SetUnequalSums(1);
  metrics.SetMemory({{"gpu0", "weights", 300}, {"gpu0", "workspace", 40}, {"host", "staging", 5}});
  metrics.SetMemory({{"gpu0", "weights", 200},
                     {"gpu0", "workspace", 40},
                     {"host", "staging", 5},
                     {"host", "workspace", 70, /*is_pinned=*/true},
                     {"host", "weights", 900}});

  const std::string text = metrics.Serialize();
  for (const char* series : {R"(logprobd_flops_total{gpu="0"} 1000000000000)",
                             R"(logprobd_gpu_busy_seconds_total{gpu="0"} 0.5)",
                             R"(logprobd_gpu_errors_total{gpu="0",kind="cuda"} 1)",
                             R"(logprobd_gpu_errors_total{gpu="0",kind="other"} 1)",
                             R"(logprobd_gpu_unequal_sums{gpu="0"} 0)",
                             R"(logprobd_gpu_memory_bytes{gpu="0",kind="weights"} 200)",
                             R"(logprobd_gpu_memory_peak_bytes{gpu="0",kind="weights"} 300)",
                             R"(logprobd_gpu_memory_bytes{gpu="0",kind="workspace"} 40)",
                             R"(logprobd_host_pinned_bytes{state="used"} 75)",
                             R"(logprobd_host_pinned_bytes{state="free"} 0)"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(series, "\n")));
  }
}

TEST(MetricsTest, CountsEachGpuSeparately) {
  Metrics metrics(WithGpus({0, 2}));

  metrics.RecordFlops(0, 100, 1);
  metrics.RecordFlops(2, 300, 3);
  metrics.RecordGpuError(2, "out_of_memory");
  metrics.SetUnequalSums(2);
  metrics.RecordCollectiveError(0, "nccl");
  metrics.RecordCollectiveError(2, "timeout");
  metrics.RecordCollectiveError(2, "a kind that nobody knows");
  metrics.RecordCollectiveError(1, "peer");
  metrics.SetMemory({{"gpu0", "weights", 10},
                     {"gpu2", "weights", 20},
                     {"gpu1", "weights", 30},
                     {"gpu2", "workspace", 5}});

  const std::string text = metrics.Serialize();
  for (const char* series :
       {R"(logprobd_flops_total{gpu="0"} 100)", R"(logprobd_flops_total{gpu="2"} 300)",
        R"(logprobd_gpu_errors_total{gpu="0",kind="out_of_memory"} 0)",
        R"(logprobd_gpu_errors_total{gpu="2",kind="out_of_memory"} 1)",
        R"(logprobd_gpu_unequal_sums{gpu="0"} 0)", R"(logprobd_gpu_unequal_sums{gpu="2"} 1)",
        R"(logprobd_collective_errors_total{gpu="0",kind="nccl"} 1)",
        R"(logprobd_collective_errors_total{gpu="2",kind="nccl"} 0)",
        R"(logprobd_collective_errors_total{gpu="2",kind="timeout"} 1)",
        R"(logprobd_collective_errors_total{gpu="2",kind="other"} 1)",
        R"(logprobd_gpu_memory_bytes{gpu="0",kind="weights"} 10)",
        R"(logprobd_gpu_memory_bytes{gpu="2",kind="weights"} 20)",
        R"(logprobd_gpu_memory_bytes{gpu="2",kind="workspace"} 5)",
        R"(logprobd_gpu_power_watts{gpu="2"} )"}) {
    EXPECT_THAT(text, HasSubstr(series));
  }
  EXPECT_THAT(text, Not(HasSubstr("gpu=\"1\"")));
}

TEST(MetricsTest, OneGpuHasNoCollectives) {
  Metrics metrics(WithGpus({0}));

  metrics.RecordCollectiveError(0, "nccl");

  EXPECT_THAT(metrics.Serialize(), Not(HasSubstr("collective")));
}

TEST(MetricsTest, CountsUnknownHeadsUnderOneLabel) {
  Metrics metrics(OneHead());
  const size_t series = CountSeries(metrics);

  for (int i = 0; i < 1'000; ++i) {
    const std::string name = absl::StrCat("made-up-", i);
    metrics.RecordRequest(Metrics::Method::kScore, name, absl::StatusCode::kNotFound, 0.001,
                          Metrics::Transport::kTcp);
    metrics.RecordRows(name, 1, 0, 0);
    metrics.SetReady(name, true);
    metrics.SetHead(Head(name, "qwen3", 1));
  }

  EXPECT_EQ(CountSeries(metrics), series);
  EXPECT_THAT(
      metrics.Serialize(),
      HasSubstr(R"(logprobd_requests_total{code="NOT_FOUND",head="unknown",method="Score"} 1000)"));
}

// The unknown head queues nothing and is never ready, which an alert would report.
TEST(MetricsTest, TheUnknownHeadHasRequestsOnly) {
  std::set<std::string> families;
  const std::string text = Metrics(OneHead()).Serialize();

  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::StrContains(line, "head=\"unknown\"")) {
      families.emplace(line.substr(0, line.find('{')));
    }
  }

  EXPECT_THAT(families,
              ElementsAre("logprobd_request_duration_seconds_bucket",
                          "logprobd_request_duration_seconds_count",
                          "logprobd_request_duration_seconds_sum", "logprobd_requests_total"));
}

TEST(MetricsTest, KeepsOneLinePerSeriesWhateverTheHeadsName) {
  const std::string name = "a\"} 1\nlogprobd_ready 5\xFF";
  Metrics metrics({.heads = {name}});
  metrics.SetReady(name, true);

  const std::string text = metrics.Serialize();

  EXPECT_THAT(text, HasSubstr("logprobd_ready{head=\"a\\\"} 1_logprobd_ready 5_\"} 1\n"));
  EXPECT_THAT(text, Not(HasSubstr("\nlogprobd_ready 5")));
}

TEST(MetricsTest, ReplacesTheInfoOfAHead) {
  Metrics metrics(OneHead());
  metrics.SetHead(Head("default", "old", 1));
  HeadInfo sharded = Head("default", "new", 2);
  sharded.layout = {{0, 0, "gpu0"}, {0, 1, "gpu1"}};
  metrics.SetHead(sharded);

  const std::string text = metrics.Serialize();

  EXPECT_THAT(text, Not(HasSubstr("model_type=\"old\"")));
  EXPECT_THAT(text, HasSubstr("model_type=\"new\""));
  EXPECT_THAT(text, HasSubstr("replicas=\"1\""));
  EXPECT_THAT(text, HasSubstr("shards=\"2\""));
  EXPECT_THAT(text, HasSubstr("logprobd_weights_version{head=\"default\"} 2\n"));
}

TEST(MetricsTest, DescribesAHeadByItsLabels) {
  HeadInfo info;
  info.name = "default";
  info.model_type = "qwen3";
  info.tensor = "lm_head.weight";
  info.hidden_size = 8;
  info.vocab_size = 100;
  info.vocab_rows = 104;
  info.dtype = Dtype::kF16;
  info.tied = true;
  info.scale = 0.5F;
  info.softcap = 30.0F;
  info.engine = "cpu/fp32";
  Metrics metrics(OneHead());
  metrics.SetHead(info);
  metrics.SetHead(info);  // again, as a head does that becomes ready

  EXPECT_THAT(metrics.Serialize(),
              HasSubstr("logprobd_head_info{bias=\"false\",dtype=\"f16\",engine=\"cpu/fp32\","
                        "head=\"default\",hidden=\"8\",model_type=\"qwen3\",replicas=\"1\","
                        "scale=\"0.5\",shards=\"1\",softcap=\"30\",tensor=\"lm_head.weight\","
                        "tied=\"true\",vocab=\"100\",vocab_rows=\"104\"} 1\n"));
  info.tied = false;
  info.has_bias = true;
  metrics.SetHead(info);
  EXPECT_THAT(metrics.Serialize(), HasSubstr("tied=\"false\""));
  EXPECT_THAT(metrics.Serialize(), HasSubstr("bias=\"true\""));
}

TEST(MetricsTest, CountsReloadsAndRefusalsOfTlsByTheirOutcome) {
  Metrics metrics(OneHead());

  metrics.RecordTlsReload(true);
  metrics.RecordTlsReload(true);
  metrics.RecordTlsReload(false);
  metrics.RecordTlsRefusal(Metrics::TlsRefusal::kRevoked);
  metrics.RecordTlsRefusal(Metrics::TlsRefusal::kListExpired);
  metrics.RecordTlsRefusal(Metrics::TlsRefusal::kListExpired);

  const std::string text = metrics.Serialize();
  for (const char* series :
       {R"(reloads_total{result="ok"} 2)", R"(reloads_total{result="failed"} 1)",
        R"(refused_certificates_total{reason="revoked"} 1)",
        R"(refused_certificates_total{reason="list_expired"} 2)",
        R"(refused_certificates_total{reason="other"} 0)"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("logprobd_tls_", series, "\n")));
  }
}

TEST(MetricsTest, TellsWhenTheCertificateExpires) {
  Metrics metrics(OneHead());
  EXPECT_THAT(metrics.Serialize(), Not(HasSubstr("certificate_expiry")));

  metrics.SetTlsCertificateExpiry(absl::FromUnixSeconds(1'800'000'000));
  metrics.SetTlsCertificateExpiry(absl::FromUnixSeconds(1'900'000'000));

  EXPECT_THAT(metrics.Serialize(),
              HasSubstr("logprobd_tls_certificate_expiry_timestamp_seconds 1900000000\n"));
}

TEST(MetricsTest, TheExpiryOfRevocationListsExistsFromTheFirstListThatExpiresOn) {
  constexpr char kExpiry[] = "logprobd_tls_revocation_expiry_timestamp_seconds ";
  Metrics metrics(OneHead());
  EXPECT_THAT(metrics.Serialize(), Not(HasSubstr("logprobd_tls_revocation")));

  metrics.SetTlsRevocation(absl::InfiniteFuture(), 0);
  EXPECT_THAT(metrics.Serialize(), Not(HasSubstr(kExpiry)));
  EXPECT_THAT(metrics.Serialize(), HasSubstr("logprobd_tls_revocation_problems 0\n"));

  metrics.SetTlsRevocation(absl::FromUnixSeconds(1'800'000'000), 2);
  EXPECT_THAT(metrics.Serialize(), HasSubstr(absl::StrCat(kExpiry, "1800000000\n")));
  EXPECT_THAT(metrics.Serialize(), HasSubstr("logprobd_tls_revocation_problems 2\n"));

  metrics.SetTlsRevocation(absl::InfiniteFuture(), 1);  // no list expires any more
  EXPECT_THAT(metrics.Serialize(), HasSubstr(absl::StrCat(kExpiry, "+Inf\n")));
  EXPECT_THAT(metrics.Serialize(), HasSubstr("logprobd_tls_revocation_problems 1\n"));
}

TEST(MetricsTest, MarksTheListenersThatAreOpen) {
  Metrics metrics(OneHead());
  EXPECT_THAT(metrics.Serialize(), Not(HasSubstr("logprobd_insecure_listener")));

  metrics.SetInsecureListener("--http");

  EXPECT_THAT(metrics.Serialize(), HasSubstr("logprobd_insecure_listener{flag=\"--http\"} 1\n"));
}

TEST(MetricsTest, CountsFromManyThreadsWhileScraped) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 2'000;
  Metrics metrics(OneHead());
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&metrics] {
      for (int call = 0; call < kCalls; ++call) {
        metrics.RecordRequest(Metrics::Method::kScore, "default", absl::StatusCode::kOk, 0.001,
                              Metrics::Transport::kShm);
        metrics.SetHead(Head("default", "qwen3", static_cast<uint64_t>(call)));
      }
    });
  }
  for (int scrape = 0; scrape < 20; ++scrape) {
    EXPECT_FALSE(metrics.Serialize().empty());
  }
  for (std::thread& thread : threads) {
    thread.join();
  }

  const std::string text = metrics.Serialize();
  EXPECT_THAT(text, HasSubstr(absl::StrCat(
                        R"(logprobd_requests_total{code="OK",head="default",method="Score"} )",
                        kThreads * kCalls, "\n")));
  // The first thread that uses a transport creates its series.
  EXPECT_THAT(text, HasSubstr(absl::StrCat(
                        R"(logprobd_request_duration_seconds_count{head="default",method="Score",)",
                        R"(transport="shm"} )", kThreads * kCalls, "\n")));
}

TEST(MetricsTest, PassesPromtool) {
#ifndef LOGPROBD_PROMTOOL
  GTEST_SKIP() << "promtool was not found: install the package prometheus";
#else
  Metrics metrics(WithGpus({0, 1}));
  metrics.SetHead(Head("default", "qwen3", 1));
  metrics.RecordStage(Metrics::Stage::kQueue, 0.01);
  const testing::TempFolder folder;
  const std::string path = folder.Write("metrics.prom", metrics.Serialize());
  const std::string report_path = folder.path("report");

  const int status = std::system(
      absl::StrCat(LOGPROBD_PROMTOOL, " check metrics < ", path, " > ", report_path, " 2>&1")
          .c_str());

  EXPECT_EQ(status, 0) << folder.Read("report");
#endif
}

TEST(ProcessMetricsTest, AreAllPlausible) {
  const MetricsSnapshot metrics = Metrics({}).Snapshot();

  EXPECT_GE(metrics.Sum("process_cpu_seconds_total"), 0);
  EXPECT_GT(metrics.Sum("process_resident_memory_bytes"), 1e6);
  EXPECT_GT(metrics.Sum("process_virtual_memory_bytes"),
            metrics.Sum("process_resident_memory_bytes"));
  EXPECT_GE(metrics.Sum("process_max_fds"), metrics.Sum("process_open_fds"));
  EXPECT_NEAR(metrics.Sum("process_start_time_seconds"), static_cast<double>(std::time(nullptr)),
              300);
}

TEST(ProcessMetricsTest, CpuTimeIsThatOfUserAndKernel) {
  constexpr double kTicks = 0.03;  // the kernel counts in ticks of 10 ms, user and kernel apart
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  const auto usage = [] {
    rusage used = {};
    getrusage(RUSAGE_SELF, &used);
    return used;
  };
  const Metrics metrics({});
  std::ifstream zeros("/dev/zero");
  std::vector<char> buffer(1 << 20);
  while (seconds(usage().ru_stime) < 4 * kTicks) {
    zeros.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
  }
  while (seconds(usage().ru_utime) < 4 * kTicks) {
    static_cast<void>(metrics.Serialize());
  }

  const rusage before = usage();
  const double reported = metrics.Snapshot().Sum("process_cpu_seconds_total");
  const rusage after = usage();

  EXPECT_GE(reported, seconds(before.ru_utime) + seconds(before.ru_stime) - kTicks);
  EXPECT_LE(reported, seconds(after.ru_utime) + seconds(after.ru_stime) + kTicks);
}

TEST(ProcessMetricsTest, CountTheOpenFiles) {
  const Metrics metrics({});

  EXPECT_EQ(metrics.Snapshot().Sum("process_open_fds"), testing::CountOpenFiles());
}

TEST(ProcessMetricsTest, CountOneMoreOpenFile) {
  const Metrics metrics({});
  const double before = metrics.Snapshot().Sum("process_open_fds");
  const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

  EXPECT_EQ(metrics.Snapshot().Sum("process_open_fds"), before + 1);

  close(fd);
}

TEST(NvmlTest, GivesZerosForADeviceThatDoesNotExist) {
  const Nvml nvml;

  const GpuReadings readings = nvml.Read(4'095, "");

  EXPECT_FALSE(readings.is_read);
  EXPECT_EQ(readings.memory_free_bytes, 0);
  EXPECT_EQ(readings.utilization_ratio, 0);
}

}  // namespace
}  // namespace logprobd
