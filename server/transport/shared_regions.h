#pragma once

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/base/client_memory.h"
#include "server/base/score_request.h"
#include "server/metrics/metrics.h"
#include "server/transport/region_memory.h"
#include "server/transport/sockets.h"

namespace logprobd {

/// The leases of clients on this host, and the regions of memory that the server shares with them.
///
/// A region is found by its id, 16 random bytes that only its client knows. It ends when it is
/// closed or its lease ends, but a request that reads it keeps its memory until the request is
/// answered. A separate thread unmaps the memory, because that may take a long time. Thread-safe.
/// Requests only read the table.
class SharedRegions {
 public:
  struct Options {
    /// Maximum number of bytes of all regions, including closed regions that requests still read. 0
    /// disables shared memory.
    int64_t bytes_max = int64_t{2} << 30;
    /// Maximum number of bytes of one region.
    int64_t region_bytes_max = int64_t{512} << 20;
    /// Maximum number of bytes of the regions of one lease.
    int64_t lease_bytes_max = int64_t{1} << 30;
    int32_t lease_regions_max = 64;  ///< Maximum number of regions of one lease.
  };

  /// A new region, with the file descriptor to send to its client.
  struct Created {
    RandomId id = {};
    int64_t bytes = 0;
    FileDescriptor file;
  };

  /// `pinning` and `metrics` must outlive the regions and every payload. Returns RESOURCE_EXHAUSTED
  /// if the system cannot create a thread.
  static absl::StatusOr<std::unique_ptr<SharedRegions>> Create(const Options& options,
                                                               HostPinning& pinning,
                                                               Metrics& metrics);
  /// Payloads may outlive the regions.
  ~SharedRegions() = default;

  /// Returns the options, with each limit reduced to the limits that contain it.
  const Options& options() const { return options_; }
  bool is_on() const { return options_.bytes_max > 0; }

  /// Opens a lease and returns its id. Returns INTERNAL if the system provides no random numbers.
  absl::StatusOr<RandomId> OpenLease();
  /// Closes a lease and all its regions.
  void CloseLease(const RandomId& lease);
  bool HasLease(const RandomId& lease) const;

  /// Creates a region. Blocks while the memory is allocated. Errors:
  ///   FAILED_PRECONDITION  shared memory is switched off
  ///   INVALID_ARGUMENT     `bytes` is 0 or above the limit of a region
  ///   RESOURCE_EXHAUSTED   too many regions or bytes of this lease, or too many bytes in total
  ///   NOT_FOUND            the lease has ended
  absl::StatusOr<Created> CreateRegion(const RandomId& lease, uint64_t bytes);

  /// Closes a region. Returns NOT_FOUND if it does not exist or belongs to another lease.
  absl::Status CloseRegion(const RandomId& lease, const RandomId& region);

  /// Returns the slice as a payload that keeps its region alive. Returns NOT_FOUND if the region
  /// does not exist, and INVALID_ARGUMENT if the slice exceeds it.
  absl::StatusOr<HiddenPayload> Find(const SharedMemorySlice& slice) const;

 private:
  struct Lease {
    int64_t bytes = 0;
    int32_t num_regions = 0;
  };
  struct Entry {
    std::shared_ptr<const Region> region;
    RandomId lease = {};
  };

  SharedRegions(const Options& options, HostPinning& pinning, std::shared_ptr<RegionReaper> reaper);

  absl::Status TakeFromLease(const RandomId& lease, int64_t bytes);
  void GiveBackToLease(const RandomId& lease, int64_t bytes);
  void GiveBackToLeaseLocked(const RandomId& lease, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  HostPinning& pinning_;
  const std::shared_ptr<RegionReaper> reaper_;
  const RegionReaper::Stopper stopper_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<RandomId, Lease> leases_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<RandomId, Entry> regions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
