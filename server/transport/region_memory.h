#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/base/client_memory.h"
#include "server/base/host.h"
#include "server/metrics/metrics.h"
#include "server/transport/sockets.h"

namespace logprobd {

/// Memory that a client may map as well: a memfd that we made, so that nobody can take its pages
/// away while they are read. It is sealed against shrinking and growing, its pages are there from
/// the start, and it is pinned for GPUs.
class RegionMemory {
 public:
  /// `bytes` are rounded up to whole pages. Takes as long as zeroing and pinning do: 0.35 s for 512
  /// MiB. `pinning` must outlive the memory. RESOURCE_EXHAUSTED when the host does not give it, or
  /// when it would leave less than an eighth of `available_bytes`.
  /// (A memfd's pages have no limit of their own: the system would take them until nothing is
  /// left.)
  static absl::StatusOr<RegionMemory> Create(
      int64_t bytes, HostPinning& pinning,
      int64_t available_bytes = ReadHostMemorySize().available_bytes);

  RegionMemory(RegionMemory&& other) noexcept;
  RegionMemory& operator=(RegionMemory&& other) = delete;
  /// Unpins and unmaps: may block.
  ~RegionMemory();

  absl::Span<const std::byte> bytes() const { return mapped_; }
  bool is_pinned() const { return is_pinned_ && pinning_->pins(); }

  /// The memfd, to be passed on and closed; the memory stays mapped here without it. Once.
  FileDescriptor TakeFile() { return std::move(file_); }

  /// `bytes` > 0 in whole pages; saturates.
  static int64_t RoundUp(int64_t bytes);

 private:
  explicit RegionMemory(HostPinning& pinning) : pinning_(&pinning) {}

  FileDescriptor file_;
  absl::Span<std::byte> mapped_;
  HostPinning* pinning_;
  bool is_pinned_ = false;
};

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
