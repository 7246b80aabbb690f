#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logprobd {

/// Which lines a count of lost ones is about: `audit` lines, or all others.
enum class LogKind { kLog, kAudit };

/// Writes lines to a file descriptor. With StartThread a thread of its own does, and no caller
/// waits, whatever the reader of the descriptor does: lines that find the queue full are lost and
/// counted. Thread-safe.
class LogWriter {
 public:
  /// Memory for lines that are not written yet. The second part is for `audit` lines only, which
  /// are thus still taken when others are lost.
  static constexpr size_t kQueueBytesMax = size_t{1} << 20;
  static constexpr size_t kAuditBytesMax = size_t{256} << 10;

  /// Makes the line that says how many were lost. The thread writes it as soon as it can.
  using LostLine = std::function<std::string(int64_t log, int64_t audit)>;

  LogWriter(int fd, LostLine lost_line) : fd_(fd), lost_line_(std::move(lost_line)) {}
  /// Waits until all lines are written.
  ~LogWriter() { StopThread(absl::InfiniteDuration()); }
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  /// From now on a thread writes the lines. Until then, and after StopThread, callers do. Returns
  /// RESOURCE_EXHAUSTED if the system cannot start one.
  absl::Status StartThread();
  /// Waits at most `time_max` until the thread has written all lines and ends it. If it does not
  /// come to that, because nobody reads what it writes, the thread stays, and the lines queue up.
  void StopThread(absl::Duration time_max);

  /// Writes `text`, which ends in a newline unless it is for a terminal.
  void Write(std::string text, LogKind kind = LogKind::kLog);
  /// Writes `text` and waits until the system has taken it. Returns false if it did not within
  /// `time_max`; it may still do so later.
  bool WriteAndWait(std::string text, LogKind kind, absl::Duration time_max);

  /// Waits at most `time_max` until all lines are written, and returns whether they are. May be
  /// called from a signal handler.
  bool Flush(absl::Duration time_max) const;

  /// Returns the number of lines that were lost, because the queue was full or the system refused
  /// to write them.
  int64_t num_lost(LogKind kind) const { return CounterOf(kind).load(); }

 private:
  enum class Outcome { kPending, kWritten, kLost };
  struct Item {
    std::string text;
    LogKind kind;
    std::shared_ptr<Outcome> outcome;  ///< Guarded by `mutex_`; null if nobody waits for it.
    size_t bytes() const { return text.size() + sizeof(Item); }
  };

  void Run();
  void Add(Item item);
  void End(const Item& item, bool is_written) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Writes all of `text` and returns whether the system has taken it. Blocks.
  bool WriteAll(absl::string_view text);
  /// Returns the line about lines that were lost since the last one, or an empty string.
  std::string TakeLostLine() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::atomic<int64_t>& CounterOf(LogKind kind) {
    return kind == LogKind::kAudit ? lost_audit_ : lost_log_;
  }
  const std::atomic<int64_t>& CounterOf(LogKind kind) const {
    return kind == LogKind::kAudit ? lost_audit_ : lost_log_;
  }

  const int fd_;
  const LostLine lost_line_;
  std::atomic<int64_t> lost_log_ = 0;
  std::atomic<int64_t> lost_audit_ = 0;
  std::atomic<int64_t> num_unwritten_ = 0;  ///< Lines that are queued or being written.

  absl::Mutex mutex_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  size_t queue_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  ///< With the line that is being written.
  int64_t told_log_ ABSL_GUARDED_BY(mutex_) = 0;    ///< Lost lines that a line has told of.
  int64_t told_audit_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_thread_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
  bool is_cut_ = false;  ///< Only a part of the last line was written. Used by who writes.
};

}  // namespace logprobd
