#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace logprobd {

/// Counts the bytes that several loaders have read, and lets each of them check whether another one
/// has failed. Thread-safe.
class LoadMeter {
 public:
  /// `progress` may be empty. It is called from one thread at a time, with a count that never
  /// decreases.
  LoadMeter(int64_t total_bytes,
            std::function<void(int64_t done_bytes, int64_t total_bytes)> progress)
      : total_bytes_(total_bytes), progress_(std::move(progress)) {}

  /// Reports that a loader has failed, so that the others can stop. The first failure is kept.
  void Fail(const absl::Status& why) {
    const absl::MutexLock lock(&mutex_);
    status_.Update(why);
    has_failed_.store(true, std::memory_order_release);
  }
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

  /// Returns the first failure of any loader, or OK.
  absl::Status status() const {
    const absl::MutexLock lock(&mutex_);
    return status_;
  }

  void Add(int64_t bytes) {
    const absl::MutexLock lock(&mutex_);
    done_bytes_ += bytes;
    if (progress_) progress_(done_bytes_, total_bytes_);
  }

 private:
  const int64_t total_bytes_;
  const std::function<void(int64_t, int64_t)> progress_;
  std::atomic<bool> has_failed_ = false;
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int64_t done_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logprobd
