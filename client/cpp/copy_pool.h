#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace logprobd::client {

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
