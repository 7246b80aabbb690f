#include "server/transport/unread_answers.h"

#include <utility>

#include "absl/algorithm/container.h"

namespace logprobd {

UnreadAnswers::UnreadAnswers(const Clock& clock) : clock_(clock), lines_(clock) {}

uint64_t UnreadAnswers::Begin(int64_t bytes, std::function<void()> cancel) {
  const absl::Time until =
      clock_.Now() + kTimeMax + absl::Seconds(static_cast<double>(bytes) / kBytesPerSecond);
  const absl::MutexLock lock(&mutex_);
  answers_.emplace(++last_number_, Answer{.until = until, .cancel = std::move(cancel)});
  return last_number_;
}

void UnreadAnswers::End(uint64_t number) {
  const auto may_return = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return cancelling_ != number || canceller_ == std::this_thread::get_id();
  };
  const absl::MutexLock lock(&mutex_);
  answers_.erase(number);
  mutex_.Await(absl::Condition(&may_return));
}

int UnreadAnswers::CancelOld() {
  const absl::Time now = clock_.Now();
  for (int count = 0;; ++count) {
    std::function<void()> cancel;
    {
      const absl::MutexLock lock(&mutex_);
      cancelling_ = std::nullopt;
      const auto old =
          absl::c_find_if(answers_, [now](const auto& entry) { return entry.second.until <= now; });
      if (old == answers_.end()) return count;
      cancelling_ = old->first;
      canceller_ = std::this_thread::get_id();
      cancel = std::move(old->second.cancel);
      answers_.erase(old);
    }
    if (const auto suppressed = lines_.Admit(); suppressed.has_value()) {
      LogWarning("a call was cancelled because its client did not take the response",
                 {{"suppressed", *suppressed}});
    }
    cancel();
  }
}

}  // namespace logprobd
