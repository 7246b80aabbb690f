#include "server/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "server/base/log.h"
#include "server/metrics/families.h"
#include "server/metrics/gpu_metrics.h"
#include "server/metrics/head_metrics.h"

namespace logprobd {
namespace {

constexpr std::array<const char*, 8> kStageNames = {"receive", "copy",    "queue", "h2d",
                                                    "kernel",  "combine", "d2h",   "reply"};
constexpr std::array<const char*, 11> kRejectionNames = {
    "queue_rows",   "queue_bytes",     "queue_requests",   "client_share",
    "deadline",     "draining",        "not_ready",        "invalid",
    "answer_bytes", "unauthenticated", "permission_denied"};
constexpr std::array<const char*, 3> kLeftAtNames = {"arrival", "queue", "engine"};
constexpr std::array<const char*, 2> kTlsReloadNames = {"failed", "ok"};
constexpr std::array<const char*, 3> kTlsRefusalNames = {"revoked", "list_expired", "other"};
constexpr std::array<const char*, 4> kMemoryKinds = {"weights", "workspace", "staging", "receive"};

/// A family with one label and one counter for each value of a fixed set.
template <size_t kCount>
class CounterSet {
 public:
  CounterSet(prometheus::Registry& registry, const char* name, const char* help, const char* label,
             const std::array<const char*, kCount>& values) {
    auto& family = AddCounters(registry, name, help);
    for (size_t i = 0; i < kCount; ++i) counters_[i] = &family.Add({{label, values[i]}});
  }

  template <typename Enum>
  prometheus::Counter& operator[](Enum value) const {
    return *counters_[static_cast<size_t>(value)];
  }

 private:
  std::array<prometheus::Counter*, kCount> counters_{};
};

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

double Number(absl::string_view text) {
  double value = 0;
  return absl::SimpleAtod(text, &value) ? value : 0;
}

/// Returns the time when the machine started, in seconds since the epoch, or 0 if it is unknown.
double BootTime() {
  const std::string stat = ReadFile("/proc/stat");
  for (const absl::string_view line : absl::StrSplit(stat, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    if (words.size() == 2 && words[0] == "btime") return Number(words[1]);
  }
  return 0;
}

double CountOpenFds() {
  std::error_code error;
  const std::filesystem::directory_iterator open("/proc/self/fd", error);
  if (error) return 0;
  int64_t count = -1;  // The directory itself is open while it is read.
  for (auto entry = begin(open); entry != end(open); entry.increment(error)) ++count;
  return static_cast<double>(count);
}

/// Statistics that the kernel keeps of this process. A value that cannot be read is 0.
struct ProcessStats {
  double cpu_seconds = 0;
  double resident_bytes = 0;
  double virtual_bytes = 0;
  double open_fds = 0;
  double max_fds = 0;
  double start_time_seconds = 0;  ///< Seconds since the epoch.
};

/// Reads /proc/self. Takes some tens of microseconds, plus time for each open file.
ProcessStats ReadProcessStats() {
  ProcessStats stats;
  const std::string stat = ReadFile("/proc/self/stat");
  // The second field is the program's name in parentheses, which may contain any character.
  const size_t name_end = stat.rfind(')');
  if (name_end != std::string::npos) {
    // The words begin at field 3, so field n of proc(5) is words[n - 3].
    const std::vector<std::string> words =
        absl::StrSplit(absl::string_view(stat).substr(name_end + 1), ' ', absl::SkipEmpty());
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    if (words.size() > 21 && ticks > 0) {
      stats.cpu_seconds = (Number(words[11]) + Number(words[12])) / ticks;
      stats.start_time_seconds = BootTime() + Number(words[19]) / ticks;
      stats.virtual_bytes = Number(words[20]);
      stats.resident_bytes = Number(words[21]) * static_cast<double>(sysconf(_SC_PAGESIZE));
    }
  }
  stats.open_fds = CountOpenFds();
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) stats.max_fds = static_cast<double>(limit.rlim_cur);
  return stats;
}

prometheus::MetricFamily ProcessFamily(const char* name, const char* help,
                                       prometheus::MetricType type, double value) {
  prometheus::ClientMetric metric;
  metric.counter.value = value;
  metric.gauge.value = value;
  return {name, help, type, {metric}};
}

void AppendProcessFamilies(std::vector<prometheus::MetricFamily>& families) {
  using prometheus::MetricType;
  const ProcessStats stats = ReadProcessStats();
  families.push_back(
      ProcessFamily("process_cpu_seconds_total",
                    "User and system CPU time that the process has used, in seconds.",
                    MetricType::Counter, stats.cpu_seconds));
  families.push_back(ProcessFamily("process_resident_memory_bytes",
                                   "Resident memory of the process, in bytes.", MetricType::Gauge,
                                   stats.resident_bytes));
  families.push_back(ProcessFamily("process_virtual_memory_bytes",
                                   "Virtual memory of the process, in bytes.", MetricType::Gauge,
                                   stats.virtual_bytes));
  families.push_back(ProcessFamily("process_open_fds", "Number of open file descriptors.",
                                   MetricType::Gauge, stats.open_fds));
  families.push_back(ProcessFamily("process_max_fds",
                                   "Largest number of file descriptors that may be open.",
                                   MetricType::Gauge, stats.max_fds));
  families.push_back(ProcessFamily("process_start_time_seconds",
                                   "Start time of the process, in seconds since the epoch.",
                                   MetricType::Gauge, stats.start_time_seconds));
}

/// Appends the lines of the process's log that were lost.
void AppendLogFamily(std::vector<prometheus::MetricFamily>& families) {
  prometheus::MetricFamily lost{"logprobd_log_lines_lost_total",
                                "Number of lines of the log that could not be written to standard "
                                "error, by kind: those about changes of weights, signals and "
                                "connections to Unix sockets (audit), and all others (log).",
                                prometheus::MetricType::Counter,
                                {}};
  constexpr std::pair<const char*, LogKind> kKinds[] = {{"audit", LogKind::kAudit},
                                                        {"log", LogKind::kLog}};
  for (const auto& [name, kind] : kKinds) {
    prometheus::ClientMetric& metric = lost.metric.emplace_back();
    metric.label = {{"kind", name}};
    metric.counter.value = static_cast<double>(LostLogLines(kind));
  }
  families.push_back(std::move(lost));
}

/// Rewrites the bounds of histogram buckets with 12 significant digits, to which they are rounded.
/// The serializer writes 16 digits, which show representation errors: le="7.499999999999999e-05".
std::string WithShortBounds(absl::string_view text) {
  std::string result;
  result.reserve(text.size());
  constexpr absl::string_view kLabel = "le=\"";
  while (true) {
    const size_t label = text.find(kLabel);
    if (label == absl::string_view::npos) return absl::StrCat(result, text);
    const size_t begin = label + kLabel.size();
    const size_t end = text.find('"', begin);
    const bool is_whole_name = label > 0 && (text[label - 1] == '{' || text[label - 1] == ',');
    const absl::string_view bound = text.substr(begin, end - begin);
    double value = 0;
    absl::StrAppend(&result, text.substr(0, begin));
    if (is_whole_name && absl::SimpleAtod(bound, &value) && std::isfinite(value)) {
      absl::StrAppendFormat(&result, "%.12g", value);
    } else {
      absl::StrAppend(&result, bound);
    }
    text.remove_prefix(end);
  }
}

}  // namespace

struct Metrics::Impl {
  explicit Impl(const Options& options)
      : heads(registry, options.heads),
        rejected(
            registry, "logprobd_rejected_total",
            "Number of requests refused before they were queued, and of calls without the right "
            "token, by reason.",
            "reason", kRejectionNames),
        cancelled(registry, "logprobd_cancelled_total",
                  "Number of requests that their client cancelled, by the stage that they were in.",
                  "stage", kLeftAtNames),
        deadline_exceeded(
            registry, "logprobd_deadline_exceeded_total",
            "Number of requests whose deadline passed, by the stage that they were in.", "stage",
            kLeftAtNames),
        received(registry, "logprobd_received_bytes_total",
                 "Size of the requests received, by transport, in bytes.", "transport",
                 kTransportNames),
        sent(registry, "logprobd_sent_bytes_total",
             "Size of the responses sent, by transport, in bytes.", "transport", kTransportNames),
        tls_reloads(registry, "logprobd_tls_reloads_total",
                    "Number of times that changed TLS certificates were read again, by result. "
                    "After a failure the earlier ones stay in use.",
                    "result", kTlsReloadNames),
        tls_expiry(AddGauges(registry, "logprobd_tls_certificate_expiry_timestamp_seconds",
                             "Time at which the first certificate of the server's chain expires, "
                             "in seconds since the epoch. Absent without TLS.")),
        tls_refusals(registry, "logprobd_tls_refused_certificates_total",
                     "Number of connections whose client certificate was refused by revocation "
                     "lists, by reason.",
                     "reason", kTlsRefusalNames),
        tls_list_expiry(AddGauges(registry, "logprobd_tls_revocation_expiry_timestamp_seconds",
                                  "Time at which the first revocation list expires, in seconds "
                                  "since the epoch: then the clients of its CA are refused. "
                                  "Absent without lists.")),
        tls_list_problems(AddGauges(registry, "logprobd_tls_revocation_problems",
                                    "Number of revocation lists that cannot be used or are "
                                    "missing, so that earlier ones stay in force. Absent without "
                                    "--tls-crl-dir.")),
        insecure_listeners(AddGauges(registry, "logprobd_insecure_listener",
                                     "1 for each listener that others can use without "
                                     "authentication, because of --insecure.")) {
    auto& stage_family =
        AddHistograms(registry, "logprobd_stage_duration_seconds",
                      "Time that a request or batch spends in a stage, in seconds.");
    for (size_t i = 0; i < kStageNames.size(); ++i) {
      stages[i] = &stage_family.Add({{"stage", kStageNames[i]}}, DurationBuckets());
    }
    inflight_bytes =
        &AddGauges(registry, "logprobd_inflight_bytes",
                   "Size of the data held for requests of all heads, in bytes. A message "
                   "counts until it is copied into a batch; the request's fields and "
                   "response count until the request is answered.")
             .Add({});
    inflight_bytes_limit =
        &AddGauges(registry, "logprobd_inflight_bytes_limit",
                   "Limit of inflight_bytes, in bytes, or 0 before it is known. Responses that "
                   "are not yet sent have a separate limit of the same size.")
             .Add({});
    shm_regions =
        &AddGauges(registry, "logprobd_shm_regions", "Number of shared-memory regions of clients.")
             .Add({});
    shm_bytes = &AddGauges(registry, "logprobd_shm_bytes",
                           "Total size of the clients' shared-memory regions, in bytes.")
                     .Add({});
    cuda_ipc_mappings = &AddGauges(registry, "logprobd_cuda_ipc_mappings",
                                   "Number of open CUDA IPC mappings of clients.")
                             .Add({});
    auto& memory =
        AddGauges(registry, "logprobd_host_memory_bytes",
                  "Host memory reserved at the start, by use, in bytes. The kind receive is an "
                  "upper bound on messages that are being received.");
    for (size_t i = 0; i < kMemoryKinds.size(); ++i) {
      host_memory[i] = &memory.Add({{"kind", kMemoryKinds[i]}});
    }
    AddGauges(registry, "logprobd_build_info", "Always 1; the labels describe the build.")
        .Add({{"version", LabelValue(options.version)},
              {"commit", LabelValue(options.commit)},
              {"grpc", LabelValue(options.grpc)}})
        .Set(1);
    if (!options.gpus.empty()) {
      gpus = std::make_unique<GpuMetrics>(registry, options.gpus, options.gpu_pci_bus_ids);
    }
  }

  /// Returns all families with their current values. The readings of the GPUs are those of the last
  /// call of Refresh.
  std::vector<prometheus::MetricFamily> Collect() const {
    inflight_bytes->Set(heads.QueuedBytes());
    std::vector<prometheus::MetricFamily> families = registry.Collect();
    AppendProcessFamilies(families);
    AppendLogFamily(families);
    return families;
  }

  prometheus::Registry registry;
  HeadMetrics heads;
  CounterSet<11> rejected;
  CounterSet<3> cancelled;
  CounterSet<3> deadline_exceeded;
  CounterSet<kNumTransports> received;
  CounterSet<kNumTransports> sent;
  CounterSet<2> tls_reloads;
  prometheus::Family<prometheus::Gauge>& tls_expiry;
  CounterSet<3> tls_refusals;
  prometheus::Family<prometheus::Gauge>& tls_list_expiry;
  prometheus::Family<prometheus::Gauge>& tls_list_problems;
  prometheus::Family<prometheus::Gauge>& insecure_listeners;
  std::array<prometheus::Histogram*, 8> stages{};
  prometheus::Gauge* inflight_bytes = nullptr;
  prometheus::Gauge* inflight_bytes_limit = nullptr;
  prometheus::Gauge* shm_regions = nullptr;
  prometheus::Gauge* shm_bytes = nullptr;
  prometheus::Gauge* cuda_ipc_mappings = nullptr;
  std::array<prometheus::Gauge*, 4> host_memory{};
  std::unique_ptr<GpuMetrics> gpus;  ///< Null without a GPU.
};

Metrics::Metrics(const Options& options) : impl_(std::make_unique<Impl>(options)) {}

Metrics::~Metrics() = default;

void Metrics::RecordRequest(Method method, absl::string_view head, absl::StatusCode code,
                            double seconds, Transport transport) {
  const auto number = static_cast<size_t>(code);
  const size_t known =
      number < kNumCodes ? number : static_cast<size_t>(absl::StatusCode::kUnknown);
  impl_->heads.Any(head).requests[static_cast<size_t>(method)][known]->Increment();
  impl_->heads.ObserveRequest(method, head, transport, seconds);
}

void Metrics::RecordStage(Stage stage, double seconds) {
  impl_->stages[static_cast<size_t>(stage)]->Observe(seconds);
}

void Metrics::RecordRows(absl::string_view head, int64_t scored, int64_t ignored,
                         int64_t nonfinite) {
  if (HeadSeries* const series = impl_->heads.Configured(head); series != nullptr) {
    series->rows_scored->Increment(static_cast<double>(scored));
    series->rows_ignored->Increment(static_cast<double>(ignored));
    series->rows_nonfinite->Increment(static_cast<double>(nonfinite));
  }
}

void Metrics::RecordBatch(absl::string_view head, int64_t rows, int64_t requests) {
  if (HeadSeries* const series = impl_->heads.Configured(head); series != nullptr) {
    series->batch_rows->Observe(static_cast<double>(rows));
    series->batch_requests->Observe(static_cast<double>(requests));
  }
}

void Metrics::RecordRejection(Rejection reason) { impl_->rejected[reason].Increment(); }

void Metrics::RecordCancelled(LeftAt stage) { impl_->cancelled[stage].Increment(); }

void Metrics::RecordDeadlineExceeded(LeftAt stage) { impl_->deadline_exceeded[stage].Increment(); }

void Metrics::RecordReceived(Transport transport, int64_t bytes) {
  impl_->received[transport].Increment(static_cast<double>(bytes));
}

void Metrics::RecordSent(Transport transport, int64_t bytes) {
  impl_->sent[transport].Increment(static_cast<double>(bytes));
}

void Metrics::RecordFlops(int gpu, double flops, double busy_seconds) {
  if (impl_->gpus != nullptr) impl_->gpus->RecordFlops(gpu, flops, busy_seconds);
}

void Metrics::RecordGpuError(int gpu, absl::string_view kind) {
  if (impl_->gpus != nullptr) impl_->gpus->RecordError(gpu, kind);
}

void Metrics::RecordCollectiveError(int gpu, absl::string_view kind) {
  if (impl_->gpus != nullptr) impl_->gpus->RecordCollectiveError(gpu, kind);
}

void Metrics::SetUnequalSums(int gpu) {
  if (impl_->gpus != nullptr) impl_->gpus->SetUnequalSums(gpu);
}

void Metrics::SetQueue(absl::string_view head, Priority priority, const QueueState& state) {
  if (HeadSeries* const series = impl_->heads.Configured(head); series != nullptr) {
    const auto index = static_cast<size_t>(priority);
    series->queue_rows[index]->Set(static_cast<double>(state.rows));
    series->queue_bytes[index]->Set(static_cast<double>(state.bytes));
    series->queue_requests[index]->Set(static_cast<double>(state.requests));
  }
}

void Metrics::SetQueueOldestAge(absl::string_view head, double seconds) {
  if (HeadSeries* const series = impl_->heads.Configured(head); series != nullptr) {
    series->queue_oldest_age->Set(seconds);
  }
}

void Metrics::SetInflightBytesLimit(int64_t limit) {
  impl_->inflight_bytes_limit->Set(static_cast<double>(limit));
}

void Metrics::SetHead(const HeadInfo& info) { impl_->heads.SetInfo(info); }

void Metrics::SetReady(absl::string_view head, bool ready) {
  if (HeadSeries* const series = impl_->heads.Configured(head); series != nullptr) {
    series->ready->Set(ready ? 1 : 0);
  }
}

void Metrics::SetReplicas(absl::string_view head, int64_t healthy, int64_t failed) {
  if (HeadSeries* const series = impl_->heads.Configured(head); series != nullptr) {
    series->replicas_healthy->Set(static_cast<double>(healthy));
    series->replicas_failed->Set(static_cast<double>(failed));
  }
}

void Metrics::RecordWeightsLoad(absl::string_view head, double seconds) {
  if (HeadSeries* const series = impl_->heads.Configured(head); series != nullptr) {
    series->weights_load->Observe(seconds);
  }
}

void Metrics::RecordWeightsSwap(absl::string_view head, WeightsSwap result) {
  if (HeadSeries* const series = impl_->heads.Configured(head); series != nullptr) {
    series->weights_swaps[static_cast<size_t>(result)]->Increment();
  }
}

void Metrics::SetShmRegions(int64_t regions, int64_t bytes) {
  impl_->shm_regions->Set(static_cast<double>(regions));
  impl_->shm_bytes->Set(static_cast<double>(bytes));
}

void Metrics::SetCudaIpcMappings(int64_t mappings) {
  impl_->cuda_ipc_mappings->Set(static_cast<double>(mappings));
}

void Metrics::RecordTlsReload(bool is_ok) {
  impl_->tls_reloads[static_cast<size_t>(is_ok)].Increment();
}

void Metrics::SetTlsCertificateExpiry(absl::Time expiry) {
  impl_->tls_expiry.Add({}).Set(static_cast<double>(absl::ToUnixSeconds(expiry)));
}

void Metrics::SetTlsRevocation(absl::Time expiry, int64_t problems) {
  const bool expires = expiry != absl::InfiniteFuture();
  if (expires || impl_->tls_list_expiry.Has({})) {
    impl_->tls_list_expiry.Add({}).Set(expires ? static_cast<double>(absl::ToUnixSeconds(expiry))
                                               : std::numeric_limits<double>::infinity());
  }
  impl_->tls_list_problems.Add({}).Set(static_cast<double>(problems));
}

void Metrics::RecordTlsRefusal(TlsRefusal reason) { impl_->tls_refusals[reason].Increment(); }

void Metrics::SetInsecureListener(absl::string_view flag) {
  impl_->insecure_listeners.Add({{"flag", std::string(flag)}}).Set(1);
}

void Metrics::SetMemory(const MemoryPlan& plan) {
  std::map<std::string, int64_t> host;
  for (const MemoryUse& use : plan) {
    if (use.place == "host") host[use.kind] += use.bytes;
  }
  for (size_t i = 0; i < kMemoryKinds.size(); ++i) {
    impl_->host_memory[i]->Set(static_cast<double>(host[kMemoryKinds[i]]));
  }
  if (impl_->gpus != nullptr) impl_->gpus->SetMemory(plan);
}

void Metrics::ReadGpus() {
  if (impl_->gpus != nullptr) impl_->gpus->Refresh();
}

MetricsSnapshot Metrics::Snapshot() const { return MetricsSnapshot(impl_->Collect()); }

std::string Metrics::Serialize() const {
  if (impl_->gpus != nullptr) impl_->gpus->Refresh();
  std::vector<prometheus::MetricFamily> families = impl_->Collect();
  // Sorts families and series, so that two scrapes can be compared.
  std::sort(families.begin(), families.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  for (prometheus::MetricFamily& family : families) {
    std::sort(family.metric.begin(), family.metric.end(),
              [](const auto& a, const auto& b) { return a.label < b.label; });
  }
  return WithShortBounds(prometheus::TextSerializer().Serialize(families));
}

}  // namespace logprobd
