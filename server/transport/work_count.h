#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logprobd {

/// Counts requests between their arrival and the last byte of their answer. Thread-safe.
class WorkCount {
 public:
  void Begin() {
    absl::MutexLock lock(&mutex_);
    ++count_;
  }
  void End() {
    absl::MutexLock lock(&mutex_);
    --count_;
  }
  int64_t count() const {
    absl::MutexLock lock(&mutex_);
    return count_;
  }

  /// Whether nothing was left at `until`, on `clock`.
  bool AwaitNone(const Clock& clock, absl::Time until) {
    absl::MutexLock lock(&mutex_);
    return clock.AwaitUntil(mutex_,
                            absl::Condition(
                                +[](int64_t* count) { return *count == 0; }, &count_),
                            until);
  }

 private:
  mutable absl::Mutex mutex_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logprobd
