#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace logprobd {

/// Adds up what several loaders have read, and stops all where one fails. Thread-safe.
class LoadMeter {
 public:
  /// `progress` (may be empty) is told by one thread at a time, never fewer bytes than before.
  LoadMeter(int64_t total_bytes,
            std::function<void(int64_t done_bytes, int64_t total_bytes)> progress)
      : total_bytes_(total_bytes), progress_(std::move(progress)) {}

  /// A loader has failed: the others need not go on. The first reason stays.
  void Fail(const absl::Status& why) {
    const absl::MutexLock lock(&mutex_);
    status_.Update(why);
    has_failed_.store(true, std::memory_order_release);
  }
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

  /// Of all loaders.
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
