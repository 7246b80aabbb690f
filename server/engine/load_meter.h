#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace logprobd {

/// Adds up what several loaders have read. Thread-safe.
class LoadMeter {
 public:
  /// `progress` (may be empty) is told by one thread at a time, never fewer bytes than before.
  LoadMeter(int64_t total_bytes,
            std::function<void(int64_t done_bytes, int64_t total_bytes)> progress)
      : total_bytes_(total_bytes), progress_(std::move(progress)) {}

  /// A loader has failed: the others need not go on.
  void Stop() { is_stopped_ = true; }
  bool is_stopped() const { return is_stopped_; }

  void Add(int64_t bytes) {
    const absl::MutexLock lock(&mutex_);
    done_bytes_ += bytes;
    if (progress_) progress_(done_bytes_, total_bytes_);
  }

 private:
  const int64_t total_bytes_;
  const std::function<void(int64_t, int64_t)> progress_;
  std::atomic<bool> is_stopped_ = false;
  absl::Mutex mutex_;
  int64_t done_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logprobd
