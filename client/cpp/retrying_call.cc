#include "client/cpp/retrying_call.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/local_transport.h"
#include "client/cpp/secure_channel.h"

namespace logprobd::client {

bool IsMessageTooLarge(const absl::Status& status) {
  return status.code() == absl::StatusCode::kResourceExhausted &&
         absl::StrContains(status.message(), "larger than max");
}

std::optional<absl::Duration> RetryPolicy::NextDelay(const Failure& failure,
                                                     double unit_random) const {
  int32_t most = 0;
  if (absl::IsUnavailable(failure.status)) most = attempts_max;
  if (absl::IsResourceExhausted(failure.status)) most = overloaded_attempts_max;
  const absl::Duration least = failure.pushback.value_or(absl::ZeroDuration());
  if (failure.attempts >= most || least < absl::ZeroDuration() ||
      IsMessageTooLarge(failure.status) || IsPlacementRefusal(failure.status)) {
    return std::nullopt;
  }
  // The exponent is bounded so that ldexp stays finite; backoff_max limits the delay long before.
  const int exponent = std::min(failure.attempts - 1, 60);
  const absl::Duration bound = std::min(backoff_max, backoff_initial * std::ldexp(1.0, exponent));
  // Jitter is added to the server's hint: clients refused together must not return together.
  const absl::Duration delay = least + bound * unit_random;
  if (delay >= failure.remaining) return std::nullopt;
  return delay;
}

namespace {

/// State of one call. The callbacks of its attempts own it.
struct Attempts {
  const CallEnvironment& environment;
  CallSpec spec;
  absl::AnyInvocable<void(CallOutcome) &&> done;
  absl::Time begin;
  int32_t made = 0;
  bool is_reported = false;  ///< True after on_wait was called.
};

void Attempt(const std::shared_ptr<Attempts>& call);

/// Returns advice if gRPC's message says that TLS may prevent the connection, or that the peer
/// speaks HTTP/1; otherwise "".
std::string ConnectionHint(const absl::Status& status) {
  std::string tls_hint = TlsHint(status.message());
  if (!tls_hint.empty()) return tls_hint;
  const bool is_http1 = absl::StrContains(status.message(), "http1.x server") ||
                        absl::StrContains(status.message(), "Failed parsing HTTP/2");
  return is_http1 ? "; the peer answers with HTTP/1: is this the --http port? The gRPC port is "
                    "8470 by default"
                  : "";
}

/// Returns the time to wait before the next attempt, or nullopt to give up.
std::optional<absl::Duration> NextDelay(const Attempts& call, const RpcReply& reply) {
  const CallEnvironment& environment = call.environment;
  const absl::Duration remaining = call.spec.deadline - environment.transport->Now();
  // The server does not hold the pinned version. Each server says so at most once per call.
  if (reply.can_go_elsewhere && absl::IsFailedPrecondition(reply.status)) {
    return absl::ZeroDuration();
  }
  const std::optional<absl::Duration> delay = environment.retry.NextDelay(
      {.attempts = call.made,
       .status = reply.status,
       .pushback = reply.pushback,
       .remaining = reply.can_go_elsewhere ? absl::InfiniteDuration() : remaining},
      environment.unit_random());
  if (!delay.has_value() || !reply.can_go_elsewhere) return delay;
  return remaining > absl::ZeroDuration() ? std::optional(absl::ZeroDuration()) : std::nullopt;
}

void HandleReply(const std::shared_ptr<Attempts>& call, RpcReply reply) {
  const CallEnvironment& environment = call->environment;
  if (!reply.status.ok()) {
    const std::optional<absl::Duration> delay = NextDelay(*call, reply);
    const absl::Time now = environment.transport->Now();
    const std::string& address = reply.server.empty() ? environment.address : reply.server;
    if (delay.has_value()) {
      if (!call->is_reported && environment.on_wait &&
          now + *delay - call->begin >= policy::kNotice) {
        call->is_reported = true;
        environment.on_wait(absl::StrFormat("no answer from %s for %.1f s; retrying: %s%s", address,
                                            absl::ToDoubleSeconds(now - call->begin),
                                            std::string(reply.status.message()),
                                            ConnectionHint(reply.status)));
      }
      environment.transport->After(*delay, call->spec.scope, [call] { Attempt(call); });
      return;
    }
    if (!reply.is_explained) {
      reply.status =
          ExplainStatus(reply.status, address, call->spec.timeout, call->made, now - call->begin);
    }
  }
  std::move(call->done)({.status = std::move(reply.status),
                         .body = reply.body,
                         .attempts = call->made,
                         .server = std::move(reply.server)});
}

void Attempt(const std::shared_ptr<Attempts>& call) {
  ++call->made;
  call->environment.transport->Call(
      {.method = call->spec.method,
       .body = call->spec.request(),
       .deadline = call->spec.deadline,
       .scope = call->spec.scope},
      [call](RpcReply reply) { HandleReply(call, std::move(reply)); });
}

}  // namespace

void StartRetryingCall(const CallEnvironment& environment, CallSpec spec,
                       absl::AnyInvocable<void(CallOutcome) &&> done) {
  Attempt(std::make_shared<Attempts>(Attempts{.environment = environment,
                                              .spec = std::move(spec),
                                              .done = std::move(done),
                                              .begin = environment.transport->Now()}));
}

absl::Status ExplainStatus(const absl::Status& status, const std::string& address,
                           absl::Duration timeout, int32_t attempts, absl::Duration elapsed) {
  const std::string tries = attempts > 1 ? absl::StrFormat(" (after %d attempts in %.1f s)",
                                                           attempts, absl::ToDoubleSeconds(elapsed))
                                         : "";
  std::string advice;
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      advice = ConnectionHint(status);
      if (!advice.empty()) break;
      advice = absl::StrCat("; check that logprobd runs and is ready at ", address,
                            ", or name another address");
      break;
    case absl::StatusCode::kDeadlineExceeded:
      advice = absl::StrCat("; no answer from ", address, " within the timeout of ",
                            absl::FormatDuration(timeout),
                            ": raise the timeout or score fewer rows per call");
      break;
    case absl::StatusCode::kResourceExhausted:
      advice = IsMessageTooLarge(status)
                   ? "; a single row, or the request_bytes option, exceeds the server's message "
                     "limit: raise --max-message-bytes on the server"
                   : "; the server stayed full: send with fewer requests in flight, allow more "
                     "time, or add servers";
      break;
    case absl::StatusCode::kUnimplemented:
      advice = absl::StrCat("; ", address,
                            " does not serve logprobd.v1.Scoring: is it the gRPC port (8470 by "
                            "default) of a logprobd of this version?");
      break;
    case absl::StatusCode::kNotFound:
      advice = "; list the heads with ListHeads (logprobctl info)";
      break;
    case absl::StatusCode::kFailedPrecondition:
      if (!IsPlacementRefusal(status)) {
        advice = "; set weights_version to 0 to score with the live weights";
      }
      break;
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
      advice = "; see the server's log for this request's id";
      break;
    default:
      break;
  }
  return {status.code(), absl::StrCat(status.message(), tries, advice)};
}

}  // namespace logprobd::client
