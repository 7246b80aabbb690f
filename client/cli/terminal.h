#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logprobd::client {

/// Text in columns. The first column is aligned left, the others right; each is as wide as its
/// widest cell.
class Table {
 public:
  explicit Table(std::vector<std::string> header);

  /// `cells` has one cell per column of the header.
  void AddRow(std::vector<std::string> cells);

  void Print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// "1,234,567"
std::string CountText(int64_t count);
/// "1.5 GiB"
std::string BytesText(int64_t bytes);
/// A duration in milliseconds: "0.213", "12.30", "456.7".
std::string MillisecondsText(double seconds);

/// A line that shows how far a command is. It rewrites itself on a terminal and prints nothing
/// elsewhere. Not thread-safe.
class ProgressLine {
 public:
  ProgressLine(std::ostream& out, bool is_terminal) : out_(out), is_terminal_(is_terminal) {}
  ~ProgressLine() { Clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// Shows `text`, at most ten times per second.
  void Update(absl::string_view text);
  /// Removes the line.
  void Clear();

 private:
  std::ostream& out_;
  const bool is_terminal_;
  size_t num_shown_ = 0;  // characters on the line
  std::chrono::steady_clock::time_point last_;
};

/// Prints a message once if it still exists after `delay`: a command that waits for its server says
/// so. While it exists, nothing else may write to `out`.
class DelayedNotice {
 public:
  DelayedNotice(std::ostream& out, std::string text, absl::Duration delay = absl::Seconds(1));
  /// Prints nothing any more.
  ~DelayedNotice();
  DelayedNotice(const DelayedNotice&) = delete;
  DelayedNotice& operator=(const DelayedNotice&) = delete;

 private:
  absl::Mutex mutex_;
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace logprobd::client
