#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/local_lease.h"

namespace logprobd::client {

/// An allocated range of a region.
struct SharedSpan {
  std::shared_ptr<SharedRegion> region;
  int64_t offset = 0;  ///< Bytes from the region's start. Page-aligned if the pool allocated it.
  int64_t bytes = 0;

  absl::Span<std::byte> memory() const {
    return region->bytes().subspan(static_cast<size_t>(offset), static_cast<size_t>(bytes));
  }
};

/// Allocates spans from the regions of one lease, and creates regions on demand. Thread-safe.
class RegionPool : public std::enable_shared_from_this<RegionPool> {
 public:
  /// `region_bytes` is the size of a region for requests. A larger span gets its own region, which
  /// is returned to the server once it is free; other regions live as long as the lease.
  RegionPool(std::shared_ptr<LocalLease> lease, int64_t region_bytes);

  /// Allocates `bytes` bytes, >= 1, which are freed with the last reference. Returns
  /// RESOURCE_EXHAUSTED if this would exceed the server's limits, and the errors of the lease.
  absl::StatusOr<std::shared_ptr<const SharedSpan>> Allocate(int64_t bytes);

  /// Returns the span of these bytes if they lie in one of the regions.
  std::optional<SharedSpan> Find(absl::Span<const std::byte> bytes);

  int64_t num_regions() const;

 private:
  struct Gap {
    int64_t begin;
    int64_t end;
  };
  struct RegionSpace {
    std::shared_ptr<SharedRegion> region;
    std::vector<Gap> gaps;  ///< The free ranges in ascending order; no two are adjacent.
    bool is_kept;           ///< Whether the pool keeps the region when all of it is free.
  };

  absl::StatusOr<RegionSpace*> Grow(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t HeldBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AboveLimits(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Free(const SharedSpan& span);

  const std::shared_ptr<LocalLease> lease_;
  const int64_t region_bytes_;
  mutable absl::Mutex mutex_;
  std::vector<RegionSpace> regions_ ABSL_GUARDED_BY(mutex_);
  /// The server's latest refusal. The pool does not ask again before `refused_until_`.
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  absl::Time refused_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

/// Copies large blocks of memory with several threads, because one thread alone writes only about
/// 10 GB/s. The threads start with the first large copy. Thread-safe.
class CopyPool {
 public:
  /// `threads` is the number of threads in addition to the caller's, >= 0.
  explicit CopyPool(int threads) : num_threads_(threads) {}
  ~CopyPool();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  /// Copies `from` to `to`, which has the same size, and returns when the copy is complete.
  void Copy(absl::Span<const std::byte> from, absl::Span<std::byte> to);

 private:
  struct Job;
  void StartThreads() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Work();

  const int num_threads_;
  absl::Mutex mutex_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd::client
