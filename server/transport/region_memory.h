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

/// Memory that the server shares with a client: a memfd that the server created, mapped and sealed
/// against shrinking and growing, so that no client can remove its pages while they are read. All
/// pages are allocated at once and pinned for GPUs.
class RegionMemory {
 public:
  /// Rounds `bytes` up to whole pages. Zeroing and pinning take 0.35 s for 512 MiB. `pinning` must
  /// outlive the memory. Returns RESOURCE_EXHAUSTED if the host refuses the allocation, or if
  /// less than an eighth of `available_bytes` would remain. (The system does not limit the pages of
  /// memfds; it would allocate them until no memory is left.)
  static absl::StatusOr<RegionMemory> Create(
      int64_t bytes, HostPinning& pinning,
      int64_t available_bytes = ReadHostMemorySize().available_bytes);

  RegionMemory(RegionMemory&& other) noexcept;
  RegionMemory& operator=(RegionMemory&& other) = delete;
  /// Unpins and unmaps the memory, which may block.
  ~RegionMemory();

  absl::Span<const std::byte> bytes() const { return mapped_; }
  bool is_pinned() const { return is_pinned_ && pinning_->pins(); }

  /// Returns the memfd to send to the client. The memory stays mapped without it. Call it once.
  FileDescriptor TakeFile() { return std::move(file_); }

  /// Rounds `bytes` > 0 up to whole pages; saturates.
  static int64_t RoundUp(int64_t bytes);

 private:
  explicit RegionMemory(HostPinning& pinning) : pinning_(&pinning) {}

  FileDescriptor file_;
  absl::Span<std::byte> mapped_;
  HostPinning* pinning_;
  bool is_pinned_ = false;
};

/// The memory of a region, and a link in the list of regions that wait to be unmapped.
struct Region {
  explicit Region(RegionMemory region_memory) : memory(std::move(region_memory)) {}
  RegionMemory memory;
  Region* next = nullptr;
};

/// Counts the memory of regions, and unmaps unused regions on a thread of its own, because the last
/// holder may be a thread that must not wait. Thread-safe.
class RegionReaper {
 public:
  /// Stops the thread in its destructor. The last holder of a region unmaps it after that.
  class Stopper {
   public:
    explicit Stopper(std::shared_ptr<RegionReaper> reaper) : reaper_(std::move(reaper)) {}
    ~Stopper() { reaper_->Stop(); }
    Stopper(const Stopper&) = delete;
    Stopper& operator=(const Stopper&) = delete;

   private:
    std::shared_ptr<RegionReaper> reaper_;
  };

  /// Allows at most `bytes_max` bytes at a time. `metrics` must outlive every region.
  static absl::StatusOr<std::shared_ptr<RegionReaper>> Create(int64_t bytes_max, Metrics& metrics);
  ~RegionReaper() = default;

  /// Counts the bytes of a region that is about to be created. Waits for regions that are being
  /// unmapped. Returns RESOURCE_EXHAUSTED if the limit would be exceeded.
  absl::Status Take(int64_t bytes);
  /// Gives the bytes back when the region could not be created.
  void GiveBack(int64_t bytes);

  /// Shares ownership of a region. When the last owner releases it, `reaper` unmaps it and gives
  /// its bytes back. A release neither waits nor allocates.
  static std::shared_ptr<const Region> Hold(std::shared_ptr<RegionReaper> reaper,
                                            RegionMemory memory);

 private:
  RegionReaper(int64_t bytes_max, Metrics& metrics) : bytes_max_(bytes_max), metrics_(metrics) {}

  void Run();
  void Stop();
  void Release(Region* region);
  void Unmap(Region* region);

  const int64_t bytes_max_;
  Metrics& metrics_;
  absl::Mutex mutex_;
  Region* waiting_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int64_t num_released_ ABSL_GUARDED_BY(mutex_) = 0;  // released and not yet unmapped
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;         // counted by Take
  int64_t num_mapped_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t mapped_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace logprobd
