#include "server/app/load_progress.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "server/base/text.h"

namespace logprobd {

void LoadProgress::Update(int64_t done_bytes, int64_t total_bytes) {
  done_bytes_ = done_bytes;
  total_bytes_ = total_bytes;
  if (!on_terminal_) {
    return;
  }
  const absl::MutexLock lock(&mutex_);
  const absl::Time now = clock_.Now();
  if (now >= next_line_) {
    next_line_ = now + absl::Milliseconds(100);
    has_line_ = true;
    std::fprintf(stderr, "\r\033[Kloading the weights: %s", Text().c_str());
  }
}

void LoadProgress::Finish() {
  done_bytes_ = 0;
  total_bytes_ = 0;
  const absl::MutexLock lock(&mutex_);
  if (has_line_) {
    std::fputs("\r\033[K", stderr);
    has_line_ = false;
  }
}

std::string LoadProgress::Text() const {
  const int64_t total = total_bytes_;
  if (total <= 0) {
    return "";
  }
  const double percent = 100 * static_cast<double>(done_bytes_) / static_cast<double>(total);
  return absl::StrCat(static_cast<int>(percent), " % of ", HumanBytes(total));
}

}  // namespace logprobd
