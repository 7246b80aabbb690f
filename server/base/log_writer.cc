#include "server/base/log_writer.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <ctime>
#include <utility>

#include "absl/status/statusor.h"
#include "server/base/errors.h"
#include "server/base/host.h"

namespace logprobd {

absl::Status LogWriter::StartThread() {
  // Signals are for other threads: this one may stand still in a write.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  absl::StatusOr<std::thread> thread = logprobd::StartThread("log", [this] { Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  LOGPROBD_RETURN_IF_ERROR(thread.status());
  thread_ = *std::move(thread);
  const absl::MutexLock lock(&mutex_);
  has_thread_ = true;
  return absl::OkStatus();
}

void LogWriter::StopThread(absl::Duration time_max) {
  {
    const absl::MutexLock lock(&mutex_);
    if (!has_thread_) return;
    is_stopping_ = true;
    if (!mutex_.AwaitWithTimeout(absl::Condition(&has_ended_), time_max)) {
      is_stopping_ = false;
      return;
    }
    has_thread_ = is_stopping_ = has_ended_ = false;
  }
  thread_.join();
}

void LogWriter::Write(std::string text, LogKind kind) {
  Add({.text = std::move(text), .kind = kind, .outcome = nullptr});
}

bool LogWriter::WriteAndWait(std::string text, LogKind kind, absl::Duration time_max) {
  const auto outcome = std::make_shared<Outcome>(Outcome::kPending);
  Add({.text = std::move(text), .kind = kind, .outcome = outcome});
  const auto is_known = [&outcome] { return *outcome != Outcome::kPending; };
  const absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&is_known), time_max);
  return *outcome == Outcome::kWritten;
}

bool LogWriter::Flush(absl::Duration time_max) const {
  const timespec pause = {.tv_sec = 0, .tv_nsec = 1'000'000};
  for (int64_t left_ms = absl::ToInt64Milliseconds(time_max); num_unwritten_ > 0; --left_ms) {
    if (left_ms <= 0) return false;
    nanosleep(&pause, nullptr);
  }
  return true;
}

void LogWriter::Add(Item item) {
  const absl::MutexLock lock(&mutex_);
  if (!has_thread_ || has_ended_) {
    End(item, WriteAll(item.text));
    return;
  }
  const size_t bytes_max = kQueueBytesMax + (item.kind == LogKind::kAudit ? kAuditBytesMax : 0);
  if (queue_bytes_ + item.bytes() > bytes_max) {
    End(item, /*is_written=*/false);
    return;
  }
  queue_bytes_ += item.bytes();
  ++num_unwritten_;
  queue_.push_back(std::move(item));
}

void LogWriter::End(const Item& item, bool is_written) {
  if (!is_written) ++CounterOf(item.kind);
  if (item.outcome != nullptr) *item.outcome = is_written ? Outcome::kWritten : Outcome::kLost;
}

void LogWriter::Run() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !queue_.empty() || is_stopping_;
  };
  while (true) {
    Item item;
    {
      const absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_work));
      if (queue_.empty()) {
        has_ended_ = true;
        return;
      }
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    const bool is_written = WriteAll(item.text);
    std::string lost_line;
    {
      const absl::MutexLock lock(&mutex_);
      End(item, is_written);
      queue_bytes_ -= item.bytes();
      // A line that tells of lost ones stands behind those that were queued before them.
      if (is_written && queue_.empty()) lost_line = TakeLostLine();
    }
    if (!lost_line.empty()) WriteAll(lost_line);
    --num_unwritten_;
  }
}

std::string LogWriter::TakeLostLine() {
  const int64_t log = lost_log_ - std::exchange(told_log_, lost_log_.load());
  const int64_t audit = lost_audit_ - std::exchange(told_audit_, lost_audit_.load());
  return log + audit == 0 ? "" : lost_line_(log, audit);
}

bool LogWriter::WriteAll(absl::string_view text) {
  if (is_cut_ && write(fd_, "\n", 1) == 1) is_cut_ = false;
  while (!text.empty()) {
    const ssize_t count = write(fd_, text.data(), text.size());
    if (count > 0) {
      text.remove_prefix(static_cast<size_t>(count));
      is_cut_ = !text.empty();
    } else if (count < 0 && errno == EAGAIN) {  // a process that shares the file made it so
      pollfd writable = {.fd = fd_, .events = POLLOUT, .revents = 0};
      poll(&writable, 1, -1);
    } else if (count == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace logprobd
