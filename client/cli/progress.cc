#include "client/cli/progress.h"

#include <algorithm>

namespace logprobd::client {

void ProgressLine::Update(absl::string_view text) {
  constexpr std::chrono::milliseconds kPause(100);
  const auto now = std::chrono::steady_clock::now();
  if (!is_terminal_ || now - last_ < kPause) return;
  last_ = now;
  const size_t padding = shown_ > text.size() ? shown_ - text.size() : 0;
  out_ << '\r' << text << std::string(padding, ' ') << std::flush;
  shown_ = text.size();
}

void ProgressLine::Clear() {
  if (shown_ == 0) return;
  out_ << '\r' << std::string(shown_, ' ') << '\r' << std::flush;
  shown_ = 0;
}

}  // namespace logprobd::client
