#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/score_args.h"
#include "client/cpp/score_result.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

using ScoreCallback = absl::AnyInvocable<void(absl::StatusOr<ScoreResult>) &&>;

/// A connection to a logprobd server. Thread-safe: share one.
///
/// Calls of any size are cut into requests within the server's limits, several in flight, and the
/// answers joined in order. Requests that the server was too busy for, or that met a broken
/// connection, are sent again (scoring has no side effects) after a random delay, never sooner than
/// the server asked.
///
/// Errors are absl::Status whose message says what to change:
///   INVALID_ARGUMENT     the arguments (field, value, limit); never retried.
///   NOT_FOUND            no head of that name.
///   FAILED_PRECONDITION  weights_version is not live.
///   ABORTED              the weights changed between the requests of one call: call again.
///   RESOURCE_EXHAUSTED   the server stayed full through every retry.
///   UNAVAILABLE          no server there, or it is not ready.
///   DEADLINE_EXCEEDED    the timeout passed.
///   UNIMPLEMENTED        another kind of server listens there.
///   CANCELLED            the Client was destroyed.
///   INTERNAL             the server failed, or broke the protocol.
class Client {
 public:
  struct Options {
    /// host:port, or unix:///path.
    std::string address = "127.0.0.1:8470";
    /// Connections, 1 to 64. One carries about 1.7 GB/s over loopback.
    int32_t channels = 4;
    /// Limit of a call, retries included, > 0.
    absl::Duration timeout = absl::Seconds(60);
    /// Most times a request is sent again, 0 to 100.
    int32_t retries = 8;
    /// Upper bound of the first random delay before a retry; doubles up to `backoff_max`.
    absl::Duration backoff_initial = absl::Milliseconds(50);
    absl::Duration backoff_max = absl::Seconds(5);
    /// Requests of one Score call that are in flight at once, 1 to 1024.
    int32_t max_inflight = 8;
    /// Target size of one request, >= 4096 bytes; the server's limit holds too. Small enough that
    /// requests overlap, large enough that their overhead vanishes.
    int64_t request_bytes = int64_t{8} << 20;
    /// Name under which the server shares its queue fairly; empty: the peer address.
    std::string client_id = {};
  };

  /// Connects lazily: an unreachable server shows at the first call, or in WaitReady.
  /// INVALID_ARGUMENT names the bad option.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const Options& options);

  /// Cancels what is in flight and returns after the last callback.
  ~Client();

  /// Scores and waits. The first call for a head also asks for its limits.
  ///
  /// Returns only when the library no longer reads `args.hidden`: after a timeout with a peer that
  /// stopped reading this can take until the connection is given up (about 40 s).
  absl::StatusOr<ScoreResult> Score(const ScoreArgs& args);

  /// As Score; `done` is called once, on a thread of the library or, for bad arguments, before this
  /// returns; it must not block and not destroy the Client.
  void ScoreAsync(const ScoreArgs& args, ScoreCallback done);

  /// The heads served and their limits.
  absl::StatusOr<ServerInfo> ListHeads();

  /// Lets the server compare its engine with double precision.
  absl::StatusOr<VerifyReport> Verify(const VerifyArgs& args);

  /// Whether the server takes scoring requests now (grpc.health.v1); UNAVAILABLE when unreachable.
  absl::StatusOr<bool> Ready();

  /// Waits until Ready() says true. DEADLINE_EXCEEDED says what it waited for.
  absl::Status WaitReady(absl::Duration timeout);

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::client
