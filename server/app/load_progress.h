#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logprobd {

/// How far a weight has been read, for /readyz, and on a terminal as a line that renews itself.
/// Thread-safe.
class LoadProgress {
 public:
  /// `on_terminal`: draw on standard error, at most ten times a second.
  LoadProgress(bool on_terminal, const Clock& clock) : on_terminal_(on_terminal), clock_(clock) {}

  /// Bytes read so far and in all.
  void Update(int64_t done_bytes, int64_t total_bytes);
  /// Takes the line off the terminal; the next head begins anew.
  void Finish();

  /// "42 % of 296.8 MiB"; empty before the first Update.
  std::string Text() const;

 private:
  const bool on_terminal_;
  const Clock& clock_;
  std::atomic<int64_t> done_bytes_ = 0;
  std::atomic<int64_t> total_bytes_ = 0;
  absl::Mutex mutex_;
  absl::Time next_line_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool has_line_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace logprobd
