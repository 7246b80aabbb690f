#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/balance.h"
#include "client/cpp/rpc_transport.h"

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

/// What every call of a client shares. Outlives the calls.
struct CallEnvironment {
  RpcTransport* transport = nullptr;
  RetryPolicy retry;
  std::string address;                  ///< For messages.
  std::function<double()> unit_random;  ///< In [0, 1), thread-safe.
  /// The servers behind `transport`; null: one, whose version of the weights must not change.
  Balance* balance = nullptr;
  bool mix_weights_versions = false;
};

/// One unary call and its retries.
struct CallSpec {
  std::string method;
  /// Encodes the request, once for each attempt.
  std::function<grpc::ByteBuffer()> request;
  absl::Time deadline = absl::InfiniteFuture();  ///< On the transport's clock; all attempts.
  absl::Duration timeout;                        ///< What the caller asked for, for messages.
  std::shared_ptr<CancelScope> scope;
};

struct CallOutcome {
  absl::Status status;  ///< In the words of ExplainStatus when it is an error.
  grpc::ByteBuffer body = {};
  int32_t attempts = 1;
  std::string server = {};  ///< As RpcReply::server.
};

/// Calls `done` once, perhaps before returning.
void StartRetryingCall(const CallEnvironment& environment, CallSpec spec,
                       absl::AnyInvocable<void(CallOutcome) &&> done);

/// The same status, its message followed by what to change.
absl::Status ExplainStatus(const absl::Status& status, const std::string& address,
                           absl::Duration timeout, int32_t attempts);

}  // namespace logprobd::client
