#pragma once

#include <chrono>
#include <ostream>
#include <string>

#include "absl/strings/string_view.h"

namespace logprobd::client {

/// One line that is written over, on a terminal; nothing elsewhere. Not thread-safe.
class ProgressLine {
 public:
  ProgressLine(std::ostream& out, bool is_terminal) : out_(out), is_terminal_(is_terminal) {}
  ~ProgressLine() { Clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// Shows `text`, at most ten times a second.
  void Update(absl::string_view text);
  /// Removes the line.
  void Clear();

 private:
  std::ostream& out_;
  const bool is_terminal_;
  size_t shown_ = 0;  // characters on the line
  std::chrono::steady_clock::time_point last_;
};

}  // namespace logprobd::client
