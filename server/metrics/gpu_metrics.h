#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/base/head_info.h"
#include "server/metrics/families.h"
#include "server/metrics/nvml.h"

namespace logprobd {

/// All families that have a GPU as label, for one GPU.
class GpuMetrics {
 public:
  GpuMetrics(prometheus::Registry& registry, int gpu);

  void RecordFlops(double flops, double busy_seconds);
  void RecordError(absl::string_view kind);
  /// Takes the entries of `plan` that lie on this GPU, and what is pinned on the host.
  void SetMemory(const MemoryPlan& plan);
  /// Reads the driver's figures; before each scrape.
  void Refresh();

 private:
  static constexpr size_t kNumKinds = 5;
  static constexpr size_t kNumErrors = 3;

  void SetKind(size_t kind, double bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int gpu_;
  const Nvml nvml_;
  prometheus::Counter* flops_;
  prometheus::Counter* busy_seconds_;
  std::array<prometheus::Counter*, kNumErrors> errors_{};
  absl::Mutex mutex_;
  double reserved_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::array<prometheus::Gauge*, kNumKinds> memory_{};
  std::array<prometheus::Gauge*, kNumKinds> memory_peak_{};
  prometheus::Gauge* utilization_;
  prometheus::Gauge* power_;
  prometheus::Gauge* sm_clock_;
  prometheus::Gauge* pinned_used_;
  prometheus::Gauge* pinned_free_;
};

}  // namespace logprobd
