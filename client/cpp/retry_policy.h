#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace logprobd::client {

/// When and how often a failed request is sent again: exponential backoff with full jitter.
struct RetryPolicy {
  int32_t retries = 8;
  absl::Duration backoff_initial = absl::Milliseconds(50);
  absl::Duration backoff_max = absl::Seconds(5);

  /// What is known of a failed attempt.
  struct Failure {
    int32_t attempts = 1;  ///< Made so far, >= 1.
    absl::Status status;
    std::optional<std::string> pushback = {};  ///< Value of grpc-retry-pushback-ms, if sent.
    absl::Duration remaining = absl::InfiniteDuration();  ///< Until the call's deadline.
  };

  /// How long to wait before the next attempt, or nothing: give up. `unit_random` is in [0, 1).
  ///
  /// Only UNAVAILABLE and RESOURCE_EXHAUSTED are tried again, and not a message that was too large.
  /// A pushback is the least delay; a negative or malformed one means: do not retry. No attempt is
  /// planned past the deadline.
  std::optional<absl::Duration> NextDelay(const Failure& failure, double unit_random) const;
};

/// Whether gRPC refused a message for its size, which no retry can heal.
bool IsMessageTooLarge(const absl::Status& status);

}  // namespace logprobd::client
