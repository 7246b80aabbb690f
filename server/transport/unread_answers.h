#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/log.h"

namespace logprobd {

/// Cancels calls whose client does not take a response in time. Otherwise clients that never read
/// would hold the bytes of the AnswerBudget, and with them the right of others to an answer, as
/// long as they like. Thread-safe.
class UnreadAnswers {
 public:
  /// Time for a client to take a response, plus a second for each kBytesPerSecond of it.
  static constexpr absl::Duration kTimeMax = absl::Seconds(30);
  static constexpr int64_t kBytesPerSecond = int64_t{1} << 20;

  /// `clock` must outlive this object.
  explicit UnreadAnswers(const Clock& clock);

  /// Notes that a response of `bytes` bytes is being sent, and returns its number. `cancel` cancels
  /// its call; it may call End.
  uint64_t Begin(int64_t bytes, std::function<void()> cancel);

  /// Notes that the response was sent or that its call has ended. 0 is the number of none. When End
  /// has returned, `cancel` is not running on another thread and is not called any more.
  void End(uint64_t number);

  /// Cancels the calls whose time is over, and returns their number. Must not be called by two
  /// threads at once.
  int CancelOld();

 private:
  struct Answer {
    absl::Time until;
    std::function<void()> cancel;
  };

  const Clock& clock_;
  LogLimiter lines_;
  absl::Mutex mutex_;
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<uint64_t, Answer> answers_ ABSL_GUARDED_BY(mutex_);
  std::optional<uint64_t> cancelling_ ABSL_GUARDED_BY(mutex_);
  std::thread::id canceller_ ABSL_GUARDED_BY(mutex_);  ///< Valid while cancelling_ is set.
};

}  // namespace logprobd
