#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/metrics/metrics.h"
#include "server/transport/region_memory.h"

namespace logprobd {

/// Memory of a region, and its place among those that wait to be unmapped.
struct Region {
  explicit Region(RegionMemory region_memory) : memory(std::move(region_memory)) {}
  RegionMemory memory;
  Region* next = nullptr;
};

/// Counts the memory of regions, and unmaps those that nobody holds any more on a thread of its
/// own: the last holder may be a thread that must not wait. Thread-safe.
class RegionReaper {
 public:
  /// Ends the thread; what is let go of later is unmapped by who does so.
  class Stopper {
   public:
    explicit Stopper(std::shared_ptr<RegionReaper> reaper) : reaper_(std::move(reaper)) {}
    ~Stopper() { reaper_->Stop(); }
    Stopper(const Stopper&) = delete;
    Stopper& operator=(const Stopper&) = delete;

   private:
    std::shared_ptr<RegionReaper> reaper_;
  };

  /// At most `bytes_max` bytes are taken at a time. `metrics` must outlive every region.
  static absl::StatusOr<std::shared_ptr<RegionReaper>> Create(int64_t bytes_max, Metrics& metrics);
  ~RegionReaper() = default;

  /// Before a region is made; RESOURCE_EXHAUSTED beyond the limit. Waits for memory that is just
  /// being unmapped.
  absl::Status Take(int64_t bytes);
  /// When it could not be made.
  void GiveBack(int64_t bytes);

  /// `reaper` counts the region until it has been unmapped, after its last holder has gone. Letting
  /// go neither waits nor allocates.
  static std::shared_ptr<const Region> Hold(std::shared_ptr<RegionReaper> reaper,
                                            RegionMemory memory);

 private:
  RegionReaper(int64_t bytes_max, Metrics& metrics) : bytes_max_(bytes_max), metrics_(metrics) {}

  void Run();
  void Stop();
  void Bury(Region* region);
  void Unmap(Region* region);

  const int64_t bytes_max_;
  Metrics& metrics_;
  absl::Mutex mutex_;
  Region* waiting_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int64_t num_buried_ ABSL_GUARDED_BY(mutex_) = 0;  // let go of and not yet unmapped
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;       // taken
  int64_t num_mapped_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t mapped_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace logprobd
