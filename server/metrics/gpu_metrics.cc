#include "server/metrics/gpu_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/base/head_info.h"

namespace logprobd {
namespace {

constexpr size_t kKindWeights = 0;
constexpr size_t kKindWorkspace = 1;
constexpr size_t kKindStaging = 2;
constexpr size_t kKindOther = 3;
constexpr size_t kKindFree = 4;
constexpr const char* kKindNames[] = {"weights", "workspace", "staging", "other", "free"};
// Errors of any other kind count under the last name of each array.
constexpr std::array kErrorNames = {"cuda", "out_of_memory", "other"};
constexpr std::array kCollectiveErrorNames = {"nccl", "peer", "timeout", "other"};
/// Maximum time to wait for a reading by another thread, which normally takes milliseconds.
constexpr absl::Duration kReadTimeMax = absl::Seconds(1);
constexpr std::array kThrottleNames = {"power_cap", "thermal", "power_brake", "hw_slowdown"};

template <size_t kCount>
size_t IndexOf(absl::string_view kind, const std::array<const char*, kCount>& names) {
  return static_cast<size_t>(std::find(names.begin(), names.end() - 1, kind) - names.begin());
}

/// Adds the increase of the driver's counter from `last` to `now` to `counter`. If `now` is
/// smaller, the driver's counter has restarted from 0.
void Follow(prometheus::Counter& counter, uint64_t& last, uint64_t now) {
  counter.Increment(static_cast<double>(now < last ? now : now - last));
  last = now;
}

}  // namespace

GpuMetrics::GpuMetrics(prometheus::Registry& registry, const std::vector<int>& gpus,
                       const std::map<int, std::string>& pci_bus_ids) {
  auto& flops = AddCounters(registry, "logprobd_flops_total",
                            "Number of floating-point operations of the heads' matrix products.");
  auto& busy_seconds = AddCounters(registry, "logprobd_gpu_busy_seconds_total",
                                   "Time that batches have spent in kernels, in seconds.");
  auto& errors =
      AddCounters(registry, "logprobd_gpu_errors_total",
                  "Number of errors of the GPU, by kind: cuda (a call failed), out_of_memory "
                  "or other.");
  auto& unequal_sums =
      AddGauges(registry, "logprobd_gpu_unequal_sums",
                "1 if a check when an engine was created found that the GPU sums products in "
                "another order on another path, so that the last bits of a row's scores may depend "
                "on its batch or on the requested outputs; otherwise 0.");
  auto& memory =
      AddGauges(registry, "logprobd_gpu_memory_bytes",
                "GPU memory by use, in bytes. The kind other is memory that the driver counts as "
                "used, by any process, beyond this server's reservations.");
  auto& peak = AddGauges(registry, "logprobd_gpu_memory_peak_bytes",
                         "Largest value of gpu_memory_bytes since the server started, in bytes.");
  for (const int gpu : gpus) {
    const std::string label = absl::StrCat(gpu);
    Series& series = gpus_[gpu];
    if (const auto found = pci_bus_ids.find(gpu); found != pci_bus_ids.end()) {
      series.pci_bus_id = found->second;
    }
    series.flops = &flops.Add({{"gpu", label}});
    series.busy_seconds = &busy_seconds.Add({{"gpu", label}});
    for (size_t kind = 0; kind < kNumErrors; ++kind) {
      series.errors[kind] = &errors.Add({{"gpu", label}, {"kind", kErrorNames[kind]}});
    }
    series.unequal_sums = &unequal_sums.Add({{"gpu", label}});
    for (size_t kind = 0; kind < kNumKinds; ++kind) {
      const prometheus::Labels labels = {{"gpu", label}, {"kind", kKindNames[kind]}};
      series.memory[kind] = &memory.Add(labels);
      series.memory_peak[kind] = kind == kKindFree ? nullptr : &peak.Add(labels);
    }
  }
  AddDriverFamilies(registry);
  if (gpus_.size() > 1) AddCollectiveErrors(registry);
  auto& pinned = AddGauges(registry, "logprobd_host_pinned_bytes",
                           "Page-locked host memory from which GPUs copy, in bytes.");
  pinned_used_ = &pinned.Add({{"state", "used"}});
  pinned_free_ = &pinned.Add({{"state", "free"}});
}

void GpuMetrics::AddDriverFamilies(prometheus::Registry& registry) {
  auto& nvml_up =
      AddGauges(registry, "logprobd_gpu_nvml_up",
                "1 if the driver reported the GPU's memory for this scrape, otherwise 0. While "
                "it is 0, memory of kind other and free is 0 and the ECC counters do not "
                "change. A power, clock or utilization that the driver does not report is 0.");
  auto& utilization = AddGauges(registry, "logprobd_gpu_utilization_ratio",
                                "Share of time during which a kernel was running, 0 to 1, as "
                                "reported by the driver.");
  auto& power =
      AddGauges(registry, "logprobd_gpu_power_watts", "Power that the GPU draws, in watts.");
  auto& sm_clock =
      AddGauges(registry, "logprobd_gpu_sm_clock_hertz", "Clock rate of the SMs, in hertz.");
  auto& throttled = AddGauges(
      registry, "logprobd_gpu_throttled",
      "1 while the clocks are lowered, by reason: power_cap (the power limit, usual under "
      "full load), thermal, power_brake (the machine's power supply) or hw_slowdown.");
  auto& ecc =
      AddCounters(registry, "logprobd_gpu_ecc_errors_total",
                  "Number of ECC errors of the GPU's memory since its driver was loaded, by "
                  "kind: corrected or uncorrected.");
  for (auto& [gpu, series] : gpus_) {
    const std::string label = absl::StrCat(gpu);
    series.nvml_up = &nvml_up.Add({{"gpu", label}});
    series.utilization = &utilization.Add({{"gpu", label}});
    series.power = &power.Add({{"gpu", label}});
    series.sm_clock = &sm_clock.Add({{"gpu", label}});
    for (size_t reason = 0; reason < kNumThrottleReasons; ++reason) {
      series.throttled[reason] =
          &throttled.Add({{"gpu", label}, {"reason", kThrottleNames[reason]}});
    }
    series.ecc_corrected = &ecc.Add({{"gpu", label}, {"kind", "corrected"}});
    series.ecc_uncorrected = &ecc.Add({{"gpu", label}, {"kind", "uncorrected"}});
  }
}

void GpuMetrics::AddCollectiveErrors(prometheus::Registry& registry) {
  auto& errors =
      AddCounters(registry, "logprobd_collective_errors_total",
                  "Number of errors in operations between GPUs, by kind: nccl, peer (access "
                  "to another GPU's memory), timeout (a batch took too long) or other.");
  for (auto& [gpu, series] : gpus_) {
    for (size_t kind = 0; kind < kNumCollectiveErrors; ++kind) {
      series.collective_errors[kind] =
          &errors.Add({{"gpu", absl::StrCat(gpu)}, {"kind", kCollectiveErrorNames[kind]}});
    }
  }
}

void GpuMetrics::RecordFlops(int gpu, double flops, double busy_seconds) {
  if (const auto found = gpus_.find(gpu); found != gpus_.end()) {
    found->second.flops->Increment(flops);
    found->second.busy_seconds->Increment(busy_seconds);
  }
}

void GpuMetrics::RecordError(int gpu, absl::string_view kind) {
  if (const auto found = gpus_.find(gpu); found != gpus_.end()) {
    found->second.errors[IndexOf(kind, kErrorNames)]->Increment();
  }
}

void GpuMetrics::RecordCollectiveError(int gpu, absl::string_view kind) {
  if (const auto found = gpus_.find(gpu); found != gpus_.end() && gpus_.size() > 1) {
    found->second.collective_errors[IndexOf(kind, kCollectiveErrorNames)]->Increment();
  }
}

void GpuMetrics::SetUnequalSums(int gpu) {
  if (const auto found = gpus_.find(gpu); found != gpus_.end()) found->second.unequal_sums->Set(1);
}

void GpuMetrics::Series::SetKind(size_t kind, double bytes) {
  memory[kind]->Set(bytes);
  if (memory_peak[kind] != nullptr) {
    memory_peak[kind]->Set(std::max(memory_peak[kind]->Value(), bytes));
  }
}

void GpuMetrics::SetMemory(const MemoryPlan& plan) {
  double pinned = 0;
  for (const MemoryUse& use : plan) {
    // Staging memory is pinned, because engines on a GPU copy from it. The plan marks other pinned
    // host memory.
    if (use.place == "host" && (use.kind == "staging" || use.is_pinned)) {
      pinned += static_cast<double>(use.bytes);
    }
  }
  pinned_used_->Set(pinned);
  const absl::MutexLock lock(&mutex_);
  for (auto& [gpu, series] : gpus_) {
    const std::string place = GpuName(gpu);
    std::array<double, kNumKinds> bytes{};
    for (const MemoryUse& use : plan) {
      if (use.place == place) {
        const size_t kind = use.kind == "weights"     ? kKindWeights
                            : use.kind == "workspace" ? kKindWorkspace
                            : use.kind == "staging"   ? kKindStaging
                                                      : kKindOther;
        bytes[kind] += static_cast<double>(use.bytes);
      }
    }
    series.reserved_bytes = bytes[kKindWeights] + bytes[kKindWorkspace] + bytes[kKindStaging];
    for (const size_t kind : {kKindWeights, kKindWorkspace, kKindStaging}) {
      series.SetKind(kind, bytes[kind]);
    }
  }
}

void GpuMetrics::Series::SetReadings(const GpuReadings& readings) {
  nvml_up->Set(readings.is_read ? 1 : 0);
  utilization->Set(readings.utilization_ratio);
  power->Set(readings.power_watts);
  sm_clock->Set(readings.sm_clock_hertz);
  const std::array reasons = {readings.throttle.power_cap, readings.throttle.thermal,
                              readings.throttle.power_brake, readings.throttle.hw_slowdown};
  for (size_t reason = 0; reason < kNumThrottleReasons; ++reason) {
    throttled[reason]->Set(reasons[reason] ? 1 : 0);
  }
  if (readings.is_read) {  // Otherwise the counters do not change.
    Follow(*ecc_corrected, ecc_corrected_read, readings.ecc_corrected);
    Follow(*ecc_uncorrected, ecc_uncorrected_read, readings.ecc_uncorrected);
  }
  SetKind(kKindFree, readings.memory_free_bytes);
  SetKind(kKindOther, std::max(0.0, readings.memory_used_bytes - reserved_bytes));
}

void GpuMetrics::Refresh() {
  {
    const absl::MutexLock lock(&mutex_);
    if (is_reading_) {
      // Only one thread waits for a driver that hangs, so that the others can answer health checks.
      const auto is_done = +[](bool* is_reading) { return !*is_reading; };
      if (!mutex_.AwaitWithTimeout(absl::Condition(is_done, &is_reading_), kReadTimeMax)) {
        for (auto& [gpu, series] : gpus_) series.SetReadings(GpuReadings());
      }
      return;
    }
    is_reading_ = true;
  }
  for (auto& [gpu, series] : gpus_) {
    const GpuReadings readings = nvml_.Read(gpu, series.pci_bus_id);
    const absl::MutexLock lock(&mutex_);
    series.SetReadings(readings);
  }
  const absl::MutexLock lock(&mutex_);
  is_reading_ = false;
}

}  // namespace logprobd
