#include "server/app/run/status.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/app/options/part_options.h"
#include "server/base/head_info.h"
#include "server/base/log.h"
#include "server/base/text.h"
#include "server/http/status_page.h"
#include "server/metrics/families.h"
#include "server/transport/grpc_versions.h"

namespace logprobd {
namespace {

using Labels = MetricsSnapshot::Labels;

// Stages in the order in which a request passes through them.
constexpr const char* kStages[] = {"receive", "copy",    "queue", "h2d",
                                   "kernel",  "combine", "d2h",   "reply"};
constexpr const char* kGpuKinds[] = {"weights", "workspace", "staging", "other", "free"};
constexpr const char* kThrottleReasons[] = {"power_cap", "thermal", "power_brake", "hw_slowdown"};
// Status codes that are faults of the server, and reasons of refusals because of load.
// deploy/monitoring uses the same ones.
constexpr const char* kFaults[] = {"UNKNOWN",  "DEADLINE_EXCEEDED", "ABORTED",
                                   "INTERNAL", "UNAVAILABLE",       "DATA_LOSS"};
constexpr const char* kRefusals[] = {"queue_rows", "queue_bytes", "queue_requests", "client_share",
                                     "answer_bytes"};
constexpr const char* kScoringMethods[] = {"Score", "ScoreStream"};

/// Two snapshots of the metrics and the changes between them.
class Window {
 public:
  Window(const MetricsSnapshot& before, const MetricsSnapshot& now, absl::Duration length)
      : before_(before), now_(now), seconds_(absl::ToDoubleSeconds(length)) {}

  double seconds() const { return seconds_; }
  const MetricsSnapshot& now() const { return now_; }

  /// Returns the increase of a counter per second.
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
  summary.p50_seconds = counts.Quantile(0.5);
  summary.p90_seconds = counts.Quantile(0.9);
  summary.p99_seconds = counts.Quantile(0.99);
  return summary;
}

/// Adds the load and latency of a head to its status.
HeadStatus WithFigures(HeadStatus head, const Window& window) {
  const std::string label = LabelValue(head.info.name);
  const Labels labels = {{"head", label}};
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
  (void)absl::SimpleAtoi(label, &gpu.gpu);  // the label was made from a number
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

/// Returns the memory of a GPU from the metrics, which include other processes and peaks.
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

/// Returns the memory that `plan` reserves outside of GPUs, with one part per kind.
std::vector<MemoryPlace> OtherMemoryOf(const MemoryPlan& plan) {
  std::vector<MemoryPlace> places;
  for (const MemoryUse& use : plan) {
    if (GpuOrdinal(use.place).has_value()) continue;
    auto place = absl::c_find_if(
        places, [&use](const MemoryPlace& other) { return other.place == use.place; });
    if (place == places.end()) place = places.insert(places.end(), MemoryPlace{use.place});
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

std::string LoadingText(const ServerHealth& health) {
  std::string text = "loading the weights";
  const auto loading =
      absl::c_find_if_not(health.heads, std::mem_fn(&ServerHealth::Head::is_loaded));
  if (health.heads.size() > 1 && loading != health.heads.end()) {
    absl::StrAppend(&text, " of ", loading->name, " (", loading - health.heads.begin(), " of ",
                    health.heads.size(), " heads loaded)");
  }
  return health.progress.empty() ? text : absl::StrCat(text, " ", health.progress);
}

}  // namespace

std::string FailureText(const ServerHealth& health) {
  std::vector<std::string> failures;
  for (const ServerHealth::Head& head : health.heads) {
    if (!head.failure.empty()) {
      const bool is_only = health.heads.size() == 1;
      failures.push_back(is_only ? head.failure
                                 : absl::StrCat("head ", head.name, ": ", head.failure));
    }
  }
  return absl::StrJoin(failures, "; ");
}

std::string NotReadyReason(const ServerHealth& health) {
  if (!health.hang.empty()) return health.hang;
  switch (health.phase) {
    case ServerHealth::Phase::kLoading:
      return LoadingText(health);
    case ServerHealth::Phase::kServing:
      return absl::c_any_of(health.heads, std::mem_fn(&ServerHealth::Head::is_ready))
                 ? ""
                 : FailureText(health);
    case ServerHealth::Phase::kStopping:
      break;
  }
  return "shutting down";
}

std::string ReadyText(const ServerHealth& health) {
  const std::string failure = FailureText(health);
  return failure.empty() ? "ready" : absl::StrCat("ready, but ", failure);
}

std::pair<ServingState, std::string> StateOf(const ServerHealth& health) {
  const std::string reason = NotReadyReason(health);
  if (!reason.empty()) return {ServingState::kNotReady, reason};
  return {FailureText(health).empty() ? ServingState::kReady : ServingState::kDegraded,
          ReadyText(health)};
}

std::vector<std::string> ListenerWarnings(const ServerOptions& options,
                                          absl::string_view grpc_version) {
  std::vector<std::string> warnings;
  for (const std::string& flag : InsecureListeners(options)) {
    warnings.push_back(
        absl::StrCat(flag, " is open to everyone who reaches it, because --insecure is given"));
  }
  const std::string holes = GrpcVulnerabilities(grpc_version);
  // A peer without a certificate sends gRPC nothing.
  if (holes.empty() || TlsOptionsOf(options).needs_client_certificates()) return warnings;
  for (const std::string& flag : PublicGrpcListeners(options)) {
    warnings.push_back(absl::StrCat(
        flag, " can be reached from other hosts, and gRPC ", grpc_version,
        " has holes that need no token: ", holes,
        ". Run a build with a newer gRPC, demand client certificates, or put a proxy in front"));
  }
  return warnings;
}

void LoadProgress::Update(int64_t done_bytes, int64_t total_bytes) {
  done_bytes_ = done_bytes;
  total_bytes_ = total_bytes;
  if (!on_terminal_) return;
  const absl::MutexLock lock(&mutex_);
  const absl::Time now = clock_.Now();
  if (now >= next_line_) {
    next_line_ = now + absl::Milliseconds(100);
    has_line_ = true;
    WriteToLog(absl::StrCat("\r\033[Kloading the weights: ", Text()));
  }
}

void LoadProgress::Finish() {
  done_bytes_ = 0;
  total_bytes_ = 0;
  const absl::MutexLock lock(&mutex_);
  if (has_line_) {
    WriteToLog("\r\033[K");
    has_line_ = false;
  }
}

std::string LoadProgress::Text() const {
  const int64_t total = total_bytes_;
  if (total <= 0) return "";
  const double percent = 100 * static_cast<double>(done_bytes_) / static_cast<double>(total);
  return absl::StrCat(static_cast<int>(percent), " % of ", HumanBytes(total));
}

StatusBoard::StatusBoard(Metrics& metrics, const Clock& clock)
    : metrics_(metrics), clock_(clock), start_(clock.Now()) {
  samples_.push_back({start_, metrics.Snapshot()});
}

void StatusBoard::Sample() {
  const absl::Time now = clock_.Now();
  const absl::MutexLock lock(&mutex_);
  if (now - samples_.back().time < kSamplePeriod) return;
  samples_.push_back({now, metrics_.Snapshot()});
  while (samples_.size() > 1 && now - samples_[1].time >= kWindow) samples_.pop_front();
}

StatusBoard::Sampled StatusBoard::Baseline(absl::Time now) const {
  const absl::MutexLock lock(&mutex_);
  const auto newer = absl::c_find_if(
      samples_, [now](const Sampled& sample) { return now - sample.time < kWindow; });
  return newer == samples_.begin() ? samples_.front() : *(newer - 1);
}

StatusPage StatusBoard::Page(const ServerStatus& status) {
  metrics_.ReadGpus();
  const MetricsSnapshot now = metrics_.Snapshot();
  const absl::Time time = clock_.Now();
  const Sampled before = Baseline(time);
  const Window window(before.metrics, now, time - before.time);

  StatusPage page;
  page.version = status.version;
  page.commit = status.commit;
  page.state = status.state;
  page.state_text = status.state_text;
  page.warnings = status.warnings;
  page.uptime_seconds = absl::ToDoubleSeconds(time - start_);
  page.window_seconds = window.seconds();
  page.received_bytes_per_second = window.Rate("logprobd_received_bytes_total");
  page.sent_bytes_per_second = window.Rate("logprobd_sent_bytes_total");
  for (const char* const reason : kRefusals) {
    page.refused_per_second += window.Rate("logprobd_rejected_total", {{"reason", reason}});
  }
  page.inflight_bytes = static_cast<int64_t>(now.Sum("logprobd_inflight_bytes"));
  page.inflight_bytes_max = static_cast<int64_t>(now.Sum("logprobd_inflight_bytes_limit"));
  for (const HeadStatus& head : status.heads) page.heads.push_back(WithFigures(head, window));
  for (const char* const stage : kStages) {
    page.stages.push_back(
        SummaryOf(stage, window.Histogram("logprobd_stage_duration_seconds", {{"stage", stage}})));
  }
  for (const std::string& gpu : now.LabelValues("logprobd_gpu_memory_bytes", "gpu")) {
    page.gpus.push_back(GpuOf(gpu, window));
    if (now.Sum("logprobd_gpu_unequal_sums", {{"gpu", gpu}}) > 0) {
      page.warnings.push_back(
          absl::StrCat("GPU ", gpu,
                       " sums products in another order on another path: the last bits of a row's "
                       "scores may depend on its batch and on the requested outputs. The log says "
                       "which scores are affected."));
    }
  }
  absl::c_sort(page.gpus, [](const GpuStatus& a, const GpuStatus& b) { return a.gpu < b.gpu; });
  page.memory = OtherMemoryOf(status.memory);
  for (const GpuStatus& gpu : page.gpus) page.memory.push_back(GpuMemoryOf(gpu, now));
  page.process = ProcessOf(window);
  return page;
}

}  // namespace logprobd
