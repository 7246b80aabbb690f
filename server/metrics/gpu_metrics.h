#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/base/head_info.h"
#include "server/metrics/families.h"
#include "server/metrics/nvml.h"

namespace logprobd {

/// All metric families with the GPU as a label. Calls for GPUs that the server does not use are
/// ignored.
class GpuMetrics {
 public:
  /// `gpus` holds CUDA ordinals; with more than one, the families of collectives exist too.
  /// `pci_bus_ids` holds the known bus IDs by ordinal; see Nvml::Read.
  GpuMetrics(prometheus::Registry& registry, const std::vector<int>& gpus,
             const std::map<int, std::string>& pci_bus_ids);

  void RecordFlops(int gpu, double flops, double busy_seconds);
  void RecordError(int gpu, absl::string_view kind);
  void RecordCollectiveError(int gpu, absl::string_view kind);
  void SetUnequalSums(int gpu);
  /// Publishes the entries of `plan` for these GPUs and for pinned host memory.
  void SetMemory(const MemoryPlan& plan);
  /// Updates the series from the driver; call it before each scrape. If another thread is already
  /// reading from the driver, this call waits up to a second for that thread. If that thread does
  /// not finish in time, for example because the driver hangs, nvml_up is 0.
  void Refresh();

 private:
  static constexpr size_t kNumKinds = 5;
  static constexpr size_t kNumErrors = 3;
  static constexpr size_t kNumCollectiveErrors = 4;
  static constexpr size_t kNumThrottleReasons = 4;

  /// The series of one GPU.
  struct Series {
    prometheus::Counter* flops = nullptr;
    prometheus::Counter* busy_seconds = nullptr;
    std::array<prometheus::Counter*, kNumErrors> errors{};
    std::array<prometheus::Counter*, kNumCollectiveErrors>
        collective_errors{};  ///< Null with one GPU.
    prometheus::Gauge* unequal_sums = nullptr;
    std::array<prometheus::Gauge*, kNumKinds> memory{};
    std::array<prometheus::Gauge*, kNumKinds> memory_peak{};
    prometheus::Gauge* utilization = nullptr;
    prometheus::Gauge* power = nullptr;
    prometheus::Gauge* sm_clock = nullptr;
    prometheus::Gauge* nvml_up = nullptr;
    std::array<prometheus::Gauge*, kNumThrottleReasons> throttled{};
    prometheus::Counter* ecc_corrected = nullptr;
    prometheus::Counter* ecc_uncorrected = nullptr;
    std::string pci_bus_id;  ///< Empty: not known.
    // Guarded by mutex_, as are the values of memory and memory_peak.
    double reserved_bytes = 0;
    uint64_t ecc_corrected_read = 0;  ///< The driver's counters when last read.
    uint64_t ecc_uncorrected_read = 0;

    void SetKind(size_t kind, double bytes);
    void SetReadings(const GpuReadings& readings);
  };

  void AddCollectiveErrors(prometheus::Registry& registry);
  void AddDriverFamilies(prometheus::Registry& registry);

  const Nvml nvml_;
  absl::Mutex mutex_;
  bool is_reading_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<int, Series> gpus_;  ///< By ordinal; only the guarded members change.
  prometheus::Gauge* pinned_used_;
  prometheus::Gauge* pinned_free_;
};

}  // namespace logprobd
