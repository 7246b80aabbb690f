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

/// The leases of clients on this host and the regions of memory that are shared with them.
///
/// A region is found by its id, 16 random bytes that only its client was told. It goes when it is
/// closed or its lease ends; a request that reads it keeps its memory until it is answered.
/// Unmapping, which may take long, is done by a thread of its own. Thread-safe; requests only read
/// the table.
class SharedRegions {
 public:
  struct Options {
    /// Of all regions, those that are still read included; 0: no shared memory.
    int64_t bytes_max = int64_t{2} << 30;
    int64_t region_bytes_max = int64_t{512} << 20;
    /// Of the regions of one lease.
    int64_t lease_bytes_max = int64_t{1} << 30;
    int32_t lease_regions_max = 64;
  };

  struct Created {
    RandomId id = {};
    int64_t bytes = 0;
    FileDescriptor file;
  };

  /// `pinning` and `metrics` must outlive the regions and every payload. RESOURCE_EXHAUSTED when no
  /// thread can be had.
  static absl::StatusOr<std::unique_ptr<SharedRegions>> Create(const Options& options,
                                                               HostPinning& pinning,
                                                               Metrics& metrics);
  /// Payloads may live longer.
  ~SharedRegions() = default;

  /// With the limits cut to what can be.
  const Options& options() const { return options_; }
  bool is_on() const { return options_.bytes_max > 0; }

  /// INTERNAL when the system gives no random numbers.
  absl::StatusOr<RandomId> OpenLease();
  /// Takes back all regions of the lease.
  void CloseLease(const RandomId& lease);
  bool HasLease(const RandomId& lease) const;

  /// Blocks while the memory is made. Errors:
  ///   FAILED_PRECONDITION  shared memory is switched off
  ///   INVALID_ARGUMENT     no bytes, or more than a region may have
  ///   RESOURCE_EXHAUSTED   too many regions or bytes, of this lease or of all
  ///   NOT_FOUND            the lease has ended
  absl::StatusOr<Created> CreateRegion(const RandomId& lease, uint64_t bytes);

  /// NOT_FOUND also for a region of another lease.
  absl::Status CloseRegion(const RandomId& lease, const RandomId& region);

  /// The slice as a payload that keeps its region. NOT_FOUND, or INVALID_ARGUMENT for a slice
  /// beyond the region's end.
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
