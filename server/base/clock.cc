#include "server/base/clock.h"

#include <chrono>

namespace logprobd {
namespace {

class SteadyClock final : public Clock {
 public:
  absl::Time Now() const override {
    return absl::UnixEpoch() +
           absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  }

  bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition,
                  absl::Time until) const override {
    if (until == absl::InfiniteFuture()) {
      mutex.Await(condition);
      return true;
    }
    return mutex.AwaitWithTimeout(condition, until - Now());
  }
};

}  // namespace

const Clock& Clock::Steady() {
  static const SteadyClock clock;
  return clock;
}

absl::Time WallNow() { return absl::FromChrono(std::chrono::system_clock::now()); }

}  // namespace logprobd
