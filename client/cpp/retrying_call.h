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
#include "client/cpp/policy.h"
#include "client/cpp/rpc_transport.h"

namespace logprobd::client {

/// Decides when and how often a failed request is sent again: exponential backoff with full jitter.
struct RetryPolicy {
  int32_t attempts_max = policy::kAttemptsMax;  ///< While the server is unavailable, >= 1.
  int32_t overloaded_attempts_max = policy::kOverloadedAttemptsMax;  ///< While it is full, >= 1.
  absl::Duration backoff_initial = policy::kWaitFirst;
  absl::Duration backoff_max = policy::kWaitMax;

  /// A failed attempt.
  struct Failure {
    int32_t attempts = 1;  ///< Number of attempts so far, >= 1.
    absl::Status status;
    std::optional<absl::Duration> pushback = {};          ///< See RpcReply::pushback.
    absl::Duration remaining = absl::InfiniteDuration();  ///< Time until the call's deadline.
  };

  /// Returns the time to wait before the next attempt, or nullopt to give up. `unit_random` is in
  /// [0, 1).
  ///
  /// Only UNAVAILABLE and RESOURCE_EXHAUSTED are retried, except for a message that was too large.
  /// A pushback is the minimum delay; a negative one forbids retries. No attempt is planned after
  /// the deadline.
  std::optional<absl::Duration> NextDelay(const Failure& failure, double unit_random) const;
};

/// Returns whether gRPC refused a message because of its size. A retry does not help then.
bool IsMessageTooLarge(const absl::Status& status);

/// State that all calls of a client share. It outlives the calls.
struct CallEnvironment {
  RpcTransport* transport = nullptr;
  RetryPolicy retry;
  std::string address;                  ///< Used in messages only.
  std::function<double()> unit_random;  ///< Returns numbers in [0, 1); thread-safe.
  Balance* balance = nullptr;           ///< The servers behind `transport`.
  bool mix_weights_versions = false;
  /// Called with a message when a call has been retrying for policy::kNotice, once per call; may be
  /// empty.
  std::function<void(const std::string& message)> on_wait = {};
};

/// One unary call and its retries.
struct CallSpec {
  std::string method;
  /// Encodes the request; called once per attempt.
  std::function<grpc::ByteBuffer()> request;
  absl::Time deadline = absl::InfiniteFuture();  ///< For all attempts, on the transport's clock.
  absl::Duration timeout;                        ///< The caller's timeout; used in messages only.
  std::shared_ptr<CancelScope> scope;
};

struct CallOutcome {
  absl::Status status;  ///< An error includes the advice of ExplainStatus.
  grpc::ByteBuffer body = {};
  int32_t attempts = 1;
  std::string server = {};  ///< See RpcReply::server.
};

/// Starts a call and its retries. Calls `done` once, possibly before returning.
void StartRetryingCall(const CallEnvironment& environment, CallSpec spec,
                       absl::AnyInvocable<void(CallOutcome) &&> done);

/// Returns the status with advice appended to its message. `elapsed` is the time from the first of
/// `attempts` to the last failure.
absl::Status ExplainStatus(const absl::Status& status, const std::string& address,
                           absl::Duration timeout, int32_t attempts,
                           absl::Duration elapsed = absl::ZeroDuration());

}  // namespace logprobd::client
