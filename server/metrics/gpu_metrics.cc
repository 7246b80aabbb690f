#include "server/metrics/gpu_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

constexpr size_t kKindWeights = 0;
constexpr size_t kKindWorkspace = 1;
constexpr size_t kKindStaging = 2;
constexpr size_t kKindOther = 3;
constexpr size_t kKindFree = 4;
constexpr const char* kKindNames[] = {"weights", "workspace", "staging", "other", "free"};
constexpr const char* kErrorNames[] = {"cuda", "out_of_memory", "other"};

}  // namespace

GpuMetrics::GpuMetrics(prometheus::Registry& registry, int gpu) : gpu_(gpu) {
  const std::string label = absl::StrCat(gpu);
  flops_ = &AddCounters(registry, "logprobd_flops_total",
                        "Floating-point operations of the head's matrix products.")
                .Add({{"gpu", label}});
  busy_seconds_ = &AddCounters(registry, "logprobd_gpu_busy_seconds_total",
                               "Time that batches spent in kernels, in seconds.")
                       .Add({{"gpu", label}});
  auto& errors = AddCounters(registry, "logprobd_gpu_errors_total",
                             "Errors of the GPU: cuda (a call failed), out_of_memory or other.");
  for (size_t kind = 0; kind < kNumErrors; ++kind) {
    errors_[kind] = &errors.Add({{"gpu", label}, {"kind", kErrorNames[kind]}});
  }
  auto& memory = AddGauges(registry, "logprobd_gpu_memory_bytes",
                           "GPU memory by what it holds, in bytes; other is what the driver counts "
                           "as used beyond our own, of all processes.");
  auto& peak = AddGauges(registry, "logprobd_gpu_memory_peak_bytes",
                         "Largest gpu_memory_bytes since the start, in bytes.");
  for (size_t kind = 0; kind < kNumKinds; ++kind) {
    const prometheus::Labels labels = {{"gpu", label}, {"kind", kKindNames[kind]}};
    memory_[kind] = &memory.Add(labels);
    memory_peak_[kind] = kind == kKindFree ? nullptr : &peak.Add(labels);
  }
  utilization_ = &AddGauges(registry, "logprobd_gpu_utilization_ratio",
                            "Share of time with a kernel running, 0 to 1, as the driver says.")
                      .Add({{"gpu", label}});
  power_ = &AddGauges(registry, "logprobd_gpu_power_watts", "Power drawn by the GPU, in watts.")
                .Add({{"gpu", label}});
  sm_clock_ = &AddGauges(registry, "logprobd_gpu_sm_clock_hertz", "Clock of the SMs, in hertz.")
                   .Add({{"gpu", label}});
  auto& pinned = AddGauges(registry, "logprobd_host_pinned_bytes",
                           "Page-locked host memory that GPUs copy from, in bytes.");
  pinned_used_ = &pinned.Add({{"state", "used"}});
  pinned_free_ = &pinned.Add({{"state", "free"}});
}

void GpuMetrics::RecordFlops(double flops, double busy_seconds) {
  flops_->Increment(flops);
  busy_seconds_->Increment(busy_seconds);
}

void GpuMetrics::RecordError(absl::string_view kind) {
  const auto* const found = std::find(std::begin(kErrorNames), std::end(kErrorNames) - 1, kind);
  errors_[static_cast<size_t>(found - std::begin(kErrorNames))]->Increment();
}

void GpuMetrics::SetKind(size_t kind, double bytes) {
  memory_[kind]->Set(bytes);
  if (memory_peak_[kind] != nullptr) {
    memory_peak_[kind]->Set(std::max(memory_peak_[kind]->Value(), bytes));
  }
}

void GpuMetrics::SetMemory(const MemoryPlan& plan) {
  std::array<double, kNumKinds> bytes{};
  double pinned = 0;
  for (const MemoryUse& use : plan) {
    // Engines on a GPU copy from staging; what else of the host they pinned is marked.
    if (use.place == "host" && (use.kind == "staging" || use.is_pinned)) {
      pinned += static_cast<double>(use.bytes);
    }
    if (use.place != absl::StrCat("gpu", gpu_)) {
      continue;
    }
    const size_t kind = use.kind == "weights"     ? kKindWeights
                        : use.kind == "workspace" ? kKindWorkspace
                        : use.kind == "staging"   ? kKindStaging
                                                  : kKindOther;
    bytes[kind] += static_cast<double>(use.bytes);
  }
  const absl::MutexLock lock(&mutex_);
  reserved_bytes_ = bytes[kKindWeights] + bytes[kKindWorkspace] + bytes[kKindStaging];
  for (const size_t kind : {kKindWeights, kKindWorkspace, kKindStaging}) {
    SetKind(kind, bytes[kind]);
  }
  pinned_used_->Set(pinned);
}

void GpuMetrics::Refresh() {
  const GpuReadings readings = nvml_.Read(gpu_);
  utilization_->Set(readings.utilization_ratio);
  power_->Set(readings.power_watts);
  sm_clock_->Set(readings.sm_clock_hertz);
  const absl::MutexLock lock(&mutex_);
  SetKind(kKindFree, readings.memory_free_bytes);
  SetKind(kKindOther, std::max(0.0, readings.memory_used_bytes - reserved_bytes_));
}

}  // namespace logprobd
