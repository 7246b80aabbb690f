#include "server/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/metrics/families.h"
#include "server/metrics/gpu_metrics.h"
#include "server/metrics/head_metrics.h"
#include "server/metrics/label_value.h"
#include "server/metrics/process_stats.h"

namespace logprobd {
namespace {

constexpr std::array<const char*, 8> kStageNames = {"receive", "copy",    "queue", "h2d",
                                                    "kernel",  "combine", "d2h",   "reply"};
constexpr std::array<const char*, 9> kRejectionNames = {
    "queue_rows", "queue_bytes", "queue_requests", "client_share", "deadline",
    "draining",   "not_ready",   "invalid",        "answer_bytes"};
constexpr std::array<const char*, 3> kLeftAtNames = {"arrival", "queue", "engine"};
constexpr std::array<const char*, 4> kMemoryKinds = {"weights", "workspace", "staging", "receive"};

/// One counter for each name of a fixed set, under one label.
template <size_t kCount>
class CounterSet {
 public:
  CounterSet(prometheus::Registry& registry, const char* name, const char* help, const char* label,
             const std::array<const char*, kCount>& values) {
    auto& family = AddCounters(registry, name, help);
    for (size_t i = 0; i < kCount; ++i) {
      counters_[i] = &family.Add({{label, values[i]}});
    }
  }

  template <typename Enum>
  prometheus::Counter& operator[](Enum value) const {
    return *counters_[static_cast<size_t>(value)];
  }

 private:
  std::array<prometheus::Counter*, kCount> counters_{};
};

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
  families.push_back(ProcessFamily("process_cpu_seconds_total",
                                   "User and system CPU time spent, in seconds.",
                                   MetricType::Counter, stats.cpu_seconds));
  families.push_back(ProcessFamily("process_resident_memory_bytes", "Resident memory, in bytes.",
                                   MetricType::Gauge, stats.resident_bytes));
  families.push_back(ProcessFamily("process_virtual_memory_bytes", "Virtual memory, in bytes.",
                                   MetricType::Gauge, stats.virtual_bytes));
  families.push_back(ProcessFamily("process_open_fds", "Open file descriptors.", MetricType::Gauge,
                                   stats.open_fds));
  families.push_back(ProcessFamily("process_max_fds", "Most file descriptors that may be open.",
                                   MetricType::Gauge, stats.max_fds));
  families.push_back(ProcessFamily("process_start_time_seconds",
                                   "Start of the process, in seconds since the epoch.",
                                   MetricType::Gauge, stats.start_time_seconds));
}

}  // namespace

struct Metrics::Impl {
  explicit Impl(const Options& options)
      : heads(registry, options.heads),
        rejected(registry, "logprobd_rejected_total", "Requests refused before they were queued.",
                 "reason", kRejectionNames),
        cancelled(registry, "logprobd_cancelled_total",
                  "Requests cancelled by their client, by where they were.", "stage", kLeftAtNames),
        deadline_exceeded(registry, "logprobd_deadline_exceeded_total",
                          "Requests whose deadline passed, by where they were.", "stage",
                          kLeftAtNames),
        received(registry, "logprobd_received_bytes_total", "Request messages received, in bytes.",
                 "transport", kTransportNames),
        sent(registry, "logprobd_sent_bytes_total", "Response messages sent, in bytes.",
             "transport", kTransportNames) {
    auto& stage_family = AddHistograms(registry, "logprobd_stage_duration_seconds",
                                       "Time spent in a stage, in seconds.");
    for (size_t i = 0; i < kStageNames.size(); ++i) {
      stages[i] = &stage_family.Add({{"stage", kStageNames[i]}}, DurationBuckets());
    }
    inflight_bytes = &AddGauges(registry, "logprobd_inflight_bytes",
                                "Bytes charged to requests at hand: messages until they are copied "
                                "into a batch, their fields and answers until they are answered.")
                          .Add({});
    inflight_bytes_limit =
        &AddGauges(registry, "logprobd_inflight_bytes_limit",
                   "Most bytes that requests may be charged, 0 before it is known; answers "
                   "not yet sent are held to the same number on their own.")
             .Add({});
    shm_regions =
        &AddGauges(registry, "logprobd_shm_regions", "Shared-memory regions of clients.").Add({});
    shm_bytes = &AddGauges(registry, "logprobd_shm_bytes",
                           "Size of the shared-memory regions of clients, in bytes.")
                     .Add({});
    cuda_ipc_mappings =
        &AddGauges(registry, "logprobd_cuda_ipc_mappings", "Open CUDA IPC mappings of clients.")
             .Add({});
    auto& memory = AddGauges(registry, "logprobd_host_memory_bytes",
                             "Host memory reserved at start, by what it is for, in bytes; receive "
                             "is a bound on messages being received.");
    for (size_t i = 0; i < kMemoryKinds.size(); ++i) {
      host_memory[i] = &memory.Add({{"kind", kMemoryKinds[i]}});
    }
    AddGauges(registry, "logprobd_build_info", "1; the labels are the build's facts.")
        .Add({{"version", LabelValue(options.version)}, {"commit", LabelValue(options.commit)}})
        .Set(1);
    if (!options.gpus.empty()) {
      gpus = std::make_unique<GpuMetrics>(registry, options.gpus, options.gpu_pci_bus_ids);
    }
  }

  /// All families as they are now, of the GPUs as they were last read.
  std::vector<prometheus::MetricFamily> Collect() const {
    inflight_bytes->Set(heads.QueuedBytes());
    std::vector<prometheus::MetricFamily> families = registry.Collect();
    AppendProcessFamilies(families);
    return families;
  }

  prometheus::Registry registry;
  HeadMetrics heads;
  CounterSet<9> rejected;
  CounterSet<3> cancelled;
  CounterSet<3> deadline_exceeded;
  CounterSet<kNumTransports> received;
  CounterSet<kNumTransports> sent;
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
  if (impl_->gpus != nullptr) {
    impl_->gpus->RecordFlops(gpu, flops, busy_seconds);
  }
}

void Metrics::RecordGpuError(int gpu, absl::string_view kind) {
  if (impl_->gpus != nullptr) {
    impl_->gpus->RecordError(gpu, kind);
  }
}

void Metrics::RecordCollectiveError(int gpu, absl::string_view kind) {
  if (impl_->gpus != nullptr) {
    impl_->gpus->RecordCollectiveError(gpu, kind);
  }
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

void Metrics::SetMemory(const MemoryPlan& plan) {
  std::map<std::string, int64_t> host;
  for (const MemoryUse& use : plan) {
    if (use.place == "host") {
      host[use.kind] += use.bytes;
    }
  }
  for (size_t i = 0; i < kMemoryKinds.size(); ++i) {
    impl_->host_memory[i]->Set(static_cast<double>(host[kMemoryKinds[i]]));
  }
  if (impl_->gpus != nullptr) {
    impl_->gpus->SetMemory(plan);
  }
}

void Metrics::ReadGpus() {
  if (impl_->gpus != nullptr) {
    impl_->gpus->Refresh();
  }
}

MetricsSnapshot Metrics::Snapshot() const { return MetricsSnapshot(impl_->Collect()); }

std::string Metrics::Serialize() const {
  if (impl_->gpus != nullptr) {
    impl_->gpus->Refresh();
  }
  std::vector<prometheus::MetricFamily> families = impl_->Collect();
  // Families and series in a fixed order, so that two scrapes can be compared.
  std::sort(families.begin(), families.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  for (prometheus::MetricFamily& family : families) {
    std::sort(family.metric.begin(), family.metric.end(),
              [](const auto& a, const auto& b) { return a.label < b.label; });
  }
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace logprobd
