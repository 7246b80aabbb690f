#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace logprobd::client {

/// A table of text. The first column is left-aligned, the others are right-aligned; each is as wide
/// as its widest cell.
class Table {
 public:
  explicit Table(std::vector<std::string> header);

  /// Adds a row. `cells` has one cell per column of the header.
  void AddRow(std::vector<std::string> cells);

  void Print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// Returns a count with thousands separators, for example "1,234,567".
std::string CountText(int64_t count);
/// Returns a size with a binary unit, for example "1.5 GiB".
std::string BytesText(int64_t bytes);
/// Returns a duration in milliseconds, for example "0.213", "12.30" or "456.7".
std::string MillisecondsText(double seconds);

/// A line that shows the progress of a command. It rewrites itself on a terminal and prints nothing
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
  size_t num_shown_ = 0;  // number of characters on the line
  std::chrono::steady_clock::time_point last_;
};

/// Prints a message once if this object still exists after `delay`, so that a command reports that
/// it waits for its server. While the object exists, nothing else may write to `out`.
class DelayedNotice {
 public:
  DelayedNotice(std::ostream& out, std::string text, absl::Duration delay = absl::Seconds(1));
  /// Cancels the message if it was not printed yet.
  ~DelayedNotice();
  DelayedNotice(const DelayedNotice&) = delete;
  DelayedNotice& operator=(const DelayedNotice&) = delete;

 private:
  absl::Notification over_;
  std::thread thread_;
};

}  // namespace logprobd::client
