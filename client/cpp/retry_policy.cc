#include "client/cpp/retry_policy.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "client/cpp/local_transport.h"

namespace logprobd::client {

bool IsMessageTooLarge(const absl::Status& status) {
  return status.code() == absl::StatusCode::kResourceExhausted &&
         absl::StrContains(status.message(), "larger than max");
}

std::optional<absl::Duration> RetryPolicy::NextDelay(const Failure& failure,
                                                     double unit_random) const {
  const bool retryable = failure.status.code() == absl::StatusCode::kUnavailable ||
                         failure.status.code() == absl::StatusCode::kResourceExhausted;
  if (!retryable || failure.attempts > retries || IsMessageTooLarge(failure.status) ||
      IsAboutASlice(failure.status)) {
    return std::nullopt;
  }
  absl::Duration least = absl::ZeroDuration();
  if (failure.pushback.has_value()) {
    int64_t pushback_ms = 0;
    if (!absl::SimpleAtoi(*failure.pushback, &pushback_ms) || pushback_ms < 0) {
      return std::nullopt;
    }
    least = absl::Milliseconds(pushback_ms);
  }
  // The exponent is bounded so that ldexp stays finite; backoff_max cuts long before.
  const int exponent = std::min(failure.attempts - 1, 60);
  const absl::Duration bound = std::min(backoff_max, backoff_initial * std::ldexp(1.0, exponent));
  // Jitter comes on top of the server's hint: clients refused together must not return together.
  const absl::Duration delay = least + bound * unit_random;
  if (delay >= failure.remaining) return std::nullopt;
  return delay;
}

}  // namespace logprobd::client
