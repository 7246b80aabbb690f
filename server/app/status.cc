#include "server/app/status.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/base/device_name.h"
#include "server/base/human_bytes.h"
#include "server/http/status_page.h"
#include "server/metrics/families.h"

namespace logprobd {
namespace {

using Labels = MetricsSnapshot::Labels;

// In the order of a request's way.
constexpr const char* kStages[] = {"receive", "copy",    "queue", "h2d",
                                   "kernel",  "combine", "d2h",   "reply"};
constexpr const char* kGpuKinds[] = {"weights", "workspace", "staging", "other", "free"};
constexpr const char* kThrottleReasons[] = {"power_cap", "thermal", "power_brake", "hw_slowdown"};
// As in deploy/monitoring: what the server answers for, and what is refused for want of room.
constexpr const char* kFaults[] = {"UNKNOWN",  "DEADLINE_EXCEEDED", "ABORTED",
                                   "INTERNAL", "UNAVAILABLE",       "DATA_LOSS"};
constexpr const char* kRefusals[] = {"queue_rows", "queue_bytes", "queue_requests", "client_share",
                                     "answer_bytes"};
constexpr const char* kScoringMethods[] = {"Score", "ScoreStream"};

/// Two looks at the metrics, and what happened between them.
class Window {
 public:
  Window(const MetricsSnapshot& before, const MetricsSnapshot& now, absl::Duration length)
      : before_(before), now_(now), seconds_(absl::ToDoubleSeconds(length)) {}

  double seconds() const { return seconds_; }
  const MetricsSnapshot& now() const { return now_; }

  /// A counter's, a second.
  double Rate(absl::string_view name, const Labels& labels = {}) const {
    const double increase = now_.Sum(name, labels) - before_.Sum(name, labels);
    return seconds_ > 0 ? std::max(increase, 0.0) / seconds_ : 0;
  }

  HistogramCounts Histogram(absl::string_view name, const Labels& labels) const {
    return now_.Histogram(name, labels).Since(before_.Histogram(name, labels));
  }

 private:
  const MetricsSnapshot& before_;
  const MetricsSnapshot& now_;
  const double seconds_;
};

LatencySummary SummaryOf(std::string name, const HistogramCounts& counts) {
  LatencySummary summary;
  summary.name = std::move(name);
  summary.count = counts.count();
  summary.mean_seconds = counts.mean();
  summary.p50_seconds = counts.Quantile(0.5);
  summary.p90_seconds = counts.Quantile(0.9);
  summary.p99_seconds = counts.Quantile(0.99);
  return summary;
}

HeadLoad HeadOf(const HeadStatus& facts, const Window& window) {
  const std::string label = LabelValue(facts.info.name);
  const Labels labels = {{"head", label}};
  HeadLoad head;
  head.info = facts.info;
  head.state = facts.state;
  head.state_text = facts.state_text;
  head.is_replica_healthy = facts.is_replica_healthy;
  head.queue_rows_max = facts.queue_rows_max;
  head.requests_per_second = window.Rate("logprobd_requests_total", labels);
  head.rows_per_second = window.Rate("logprobd_rows_total", {{"head", label}, {"kind", "scored"}});
  for (const char* const code : kFaults) {
    head.faults_per_second +=
        window.Rate("logprobd_requests_total", {{"head", label}, {"code", code}});
  }
  head.batch_rows_mean = window.Histogram("logprobd_batch_rows", labels).mean();
  const MetricsSnapshot& now = window.now();
  head.nonfinite_rows = static_cast<uint64_t>(
      now.Sum("logprobd_rows_total", {{"head", label}, {"kind", "nonfinite"}}));
  head.queue_rows = static_cast<int64_t>(now.Sum("logprobd_queue_rows", labels));
  head.queue_requests = static_cast<int64_t>(now.Sum("logprobd_queue_requests", labels));
  head.queue_oldest_seconds = now.Sum("logprobd_queue_oldest_age_seconds", labels);
  HistogramCounts latency;
  for (const char* const method : kScoringMethods) {
    latency.Add(window.Histogram("logprobd_request_duration_seconds",
                                 {{"head", label}, {"method", method}}));
  }
  head.latency = SummaryOf("scoring", latency);
  return head;
}

GpuStatus GpuOf(const std::string& label, const Window& window) {
  const Labels labels = {{"gpu", label}};
  const MetricsSnapshot& now = window.now();
  GpuStatus gpu;
  (void)absl::SimpleAtoi(label, &gpu.gpu);  // we made the label of a number
  gpu.has_readings = now.Sum("logprobd_gpu_nvml_up", labels) > 0;
  gpu.utilization_ratio = now.Sum("logprobd_gpu_utilization_ratio", labels);
  gpu.power_watts = now.Sum("logprobd_gpu_power_watts", labels);
  gpu.sm_clock_hertz = now.Sum("logprobd_gpu_sm_clock_hertz", labels);
  gpu.tflops_per_second = window.Rate("logprobd_flops_total", labels) / 1e12;
  gpu.busy_ratio = window.Rate("logprobd_gpu_busy_seconds_total", labels);
  for (const char* const reason : kThrottleReasons) {
    if (now.Sum("logprobd_gpu_throttled", {{"gpu", label}, {"reason", reason}}) > 0) {
      gpu.throttled.emplace_back(reason);
    }
  }
  return gpu;
}

/// What a GPU's memory holds, as the metrics say: with other processes, and with peaks.
MemoryPlace GpuMemoryOf(const GpuStatus& gpu, const MetricsSnapshot& now) {
  MemoryPlace place{GpuName(gpu.gpu)};
  for (const char* const kind : kGpuKinds) {
    const Labels labels = {{"gpu", absl::StrCat(gpu.gpu)}, {"kind", kind}};
    place.parts.push_back(
        {kind, static_cast<int64_t>(now.Sum("logprobd_gpu_memory_bytes", labels)),
         static_cast<int64_t>(now.Sum("logprobd_gpu_memory_peak_bytes", labels))});
  }
  return place;
}

/// What is reserved at places that are no GPU, which the plan knows; entries of a kind are joined.
std::vector<MemoryPlace> OtherMemoryOf(const MemoryPlan& plan) {
  std::vector<MemoryPlace> places;
  for (const MemoryUse& use : plan) {
    if (GpuOrdinal(use.place).has_value()) {
      continue;
    }
    auto place = absl::c_find_if(
        places, [&use](const MemoryPlace& other) { return other.place == use.place; });
    if (place == places.end()) {
      place = places.insert(places.end(), MemoryPlace{use.place});
    }
    const auto part = absl::c_find_if(
        place->parts, [&use](const MemoryPart& other) { return other.kind == use.kind; });
    if (part == place->parts.end()) {
      const bool is_bound = use.kind == "receive" || use.kind == "shared";
      place->parts.push_back({use.kind, use.bytes, 0, is_bound});
    } else {
      part->bytes += use.bytes;
    }
  }
  return places;
}

std::vector<std::pair<std::string, std::string>> ProcessOf(const Window& window) {
  const MetricsSnapshot& now = window.now();
  const auto bytes = [&now](const char* name) {
    return HumanBytes(static_cast<int64_t>(now.Sum(name)));
  };
  return {{"resident memory", bytes("process_resident_memory_bytes")},
          {"CPU", absl::StrFormat("%.2f cores", window.Rate("process_cpu_seconds_total"))},
          {"open files", absl::StrCat(HumanNumber(now.Sum("process_open_fds")), " of ",
                                      HumanNumber(now.Sum("process_max_fds")))},
          {"shared with clients",
           absl::StrCat(HumanNumber(now.Sum("logprobd_shm_regions")), " regions (",
                        bytes("logprobd_shm_bytes"), "), ",
                        HumanNumber(now.Sum("logprobd_cuda_ipc_mappings")), " CUDA mappings")}};
}

}  // namespace

StatusBoard::StatusBoard(Metrics& metrics, const Clock& clock)
    : metrics_(metrics), clock_(clock), start_(clock.Now()) {
  looks_.push_back({start_, metrics.Snapshot()});
}

void StatusBoard::Sample() {
  const absl::Time now = clock_.Now();
  const absl::MutexLock lock(&mutex_);
  if (now - looks_.back().time < kSamplePeriod) {
    return;
  }
  looks_.push_back({now, metrics_.Snapshot()});
  while (looks_.size() > 1 && now - looks_[1].time >= kWindow) {
    looks_.pop_front();
  }
}

StatusBoard::Look StatusBoard::Baseline(absl::Time now) const {
  const absl::MutexLock lock(&mutex_);
  const auto younger =
      absl::c_find_if(looks_, [now](const Look& look) { return now - look.time < kWindow; });
  return younger == looks_.begin() ? looks_.front() : *(younger - 1);
}

StatusPage StatusBoard::Page(const ServerStatus& facts) {
  metrics_.ReadGpus();
  const MetricsSnapshot now = metrics_.Snapshot();
  const absl::Time time = clock_.Now();
  const Look before = Baseline(time);
  const Window window(before.metrics, now, time - before.time);

  StatusPage page;
  page.version = facts.version;
  page.commit = facts.commit;
  page.state = facts.state;
  page.state_text = facts.state_text;
  page.warnings = facts.warnings;
  page.uptime_seconds = absl::ToDoubleSeconds(time - start_);
  page.window_seconds = window.seconds();
  page.received_bytes_per_second = window.Rate("logprobd_received_bytes_total");
  page.sent_bytes_per_second = window.Rate("logprobd_sent_bytes_total");
  for (const char* const reason : kRefusals) {
    page.refused_per_second += window.Rate("logprobd_rejected_total", {{"reason", reason}});
  }
  page.inflight_bytes = static_cast<int64_t>(now.Sum("logprobd_inflight_bytes"));
  page.inflight_bytes_max = static_cast<int64_t>(now.Sum("logprobd_inflight_bytes_limit"));
  for (const HeadStatus& head : facts.heads) {
    page.heads.push_back(HeadOf(head, window));
  }
  for (const char* const stage : kStages) {
    page.stages.push_back(
        SummaryOf(stage, window.Histogram("logprobd_stage_duration_seconds", {{"stage", stage}})));
  }
  for (const std::string& gpu : now.LabelValues("logprobd_gpu_memory_bytes", "gpu")) {
    page.gpus.push_back(GpuOf(gpu, window));
  }
  absl::c_sort(page.gpus, [](const GpuStatus& a, const GpuStatus& b) { return a.gpu < b.gpu; });
  page.memory = OtherMemoryOf(facts.memory);
  for (const GpuStatus& gpu : page.gpus) {
    page.memory.push_back(GpuMemoryOf(gpu, now));
  }
  page.process = ProcessOf(window);
  return page;
}

}  // namespace logprobd
