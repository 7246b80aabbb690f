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

/// A piece of a region.
struct SharedSpan {
  std::shared_ptr<SharedRegion> region;
  int64_t offset = 0;  ///< In the region; a multiple of the page where the pool gave it.
  int64_t bytes = 0;

  absl::Span<std::byte> memory() const {
    return region->bytes().subspan(static_cast<size_t>(offset), static_cast<size_t>(bytes));
  }
};

/// The regions of one lease: made as they are needed, kept while the lease lives. Thread-safe.
class RegionPool : public std::enable_shared_from_this<RegionPool> {
 public:
  /// `region_bytes`: size of a region for requests. Larger wishes get one of their own, which is
  /// given back once it is free.
  RegionPool(std::shared_ptr<LocalLease> lease, int64_t region_bytes);

  /// `bytes` bytes, >= 1, free again with the last reference. RESOURCE_EXHAUSTED when the server's
  /// limits do not allow them; other errors of the lease.
  absl::StatusOr<std::shared_ptr<const SharedSpan>> Allocate(int64_t bytes);

  /// Where in the regions these bytes lie, if they do.
  std::optional<SharedSpan> Find(absl::Span<const std::byte> bytes);

  int64_t num_regions() const;

 private:
  struct Gap {
    int64_t begin;
    int64_t end;
  };
  struct RegionSpace {
    std::shared_ptr<SharedRegion> region;
    std::vector<Gap> gaps;  ///< What is free, in order, never adjacent.
    bool is_kept;           ///< Whether it stays when all of it is free.
  };

  absl::StatusOr<RegionSpace*> Grow(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t HeldBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AboveLimits(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Free(const SharedSpan& span);

  const std::shared_ptr<LocalLease> lease_;
  const int64_t region_bytes_;
  mutable absl::Mutex mutex_;
  std::vector<RegionSpace> regions_ ABSL_GUARDED_BY(mutex_);
  /// What the server refused last, and until when it is not asked again.
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  absl::Time refused_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

/// Copies large memory by a few threads: one alone writes about 10 GB/s. Thread-safe; threads start
/// with the first large copy.
class CopyPool {
 public:
  /// `threads` beside the caller's; 0 copies on the caller's thread alone.
  explicit CopyPool(int threads) : num_threads_(threads) {}
  ~CopyPool();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  /// Copies `from` to `to`, of the same size, and returns when all is copied.
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
