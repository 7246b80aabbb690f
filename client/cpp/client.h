#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/policy.h"
#include "client/cpp/score.h"
#include "client/cpp/server_info.h"
#include "client/cpp/tls.h"

namespace logprobd::client {

using ScoreCallback = absl::AnyInvocable<void(absl::StatusOr<ScoreResult>) &&>;

/// A client of one logprobd server, or of several that hold the same heads. Thread-safe: threads
/// can share one client.
///
/// With several servers, each request is sent to the ready server with the fewest unanswered bytes
/// of this client, so a slower server gets less work, and a large call uses all servers at once.
/// When a server drains, fails or cannot be reached, its requests are sent to another server
/// without delay. It gets requests again after a pause that grows with each failure, once its
/// health service reports SERVING. A server that refuses a request because of load is avoided for
/// the time that it asks for. While calls are made, the client checks the health and the heads of
/// each server every 10 s. Servers whose heads differ (vocabulary, hidden size, dtype, scale, soft
/// cap, bias) are refused.
///
/// All rows of a call are scored by one version of the weights: the pinned version, or the version
/// of the first response. A request that another version scored is sent again to a server that
/// holds the call's version. If no server holds that version any more, the call starts again with
/// the version that is live, at most 3 times.
///
/// A call of any size is split into requests within the server's limits; several are in flight at
/// once, and the responses are joined in order. Scoring has no side effects, so requests that were
/// refused because of load or whose connection broke are sent again after a random delay, which is
/// never shorter than the server's hint.
///
/// Errors are absl::Status values whose message says what to change:
///   INVALID_ARGUMENT     an argument is wrong (field, value, limit); never retried.
///   NOT_FOUND            no head has that name.
///   FAILED_PRECONDITION  weights_version is not live, or the servers' heads differ (the message
///                        names both servers).
///   ABORTED              no version of the weights could score the whole call; the message names
///                        the versions and their servers.
///   RESOURCE_EXHAUSTED   the server stayed full through every retry.
///   UNAVAILABLE          the server cannot be reached or is not ready; with several servers, no
///                        server is ready; the message names each server and why.
///   DEADLINE_EXCEEDED    the timeout passed.
///   UNIMPLEMENTED        another kind of gRPC server listens at the address.
///   CANCELLED            the Client was destroyed.
///   INTERNAL             the server failed, or its response violates the protocol.
class Client {
 public:
  struct Options {
    /// host:port (IPv6 in brackets), unix:///path or dns:///name:port; several addresses are
    /// separated by commas. dns:/// means one server per A or AAAA record of the name, for example
    /// of a Kubernetes headless service; the name is resolved every 30 s and after failures.
    std::string address = "127.0.0.1:8470";
    /// Number of connections to each server, 1 to 64. One connection carries about 1.7 GB/s over
    /// loopback.
    int32_t channels = 4;
    /// Time limit of a call, including retries, > 0.
    absl::Duration timeout = policy::kCallTimeout;
    /// Maximum number of attempts at a request while servers are unavailable, >= 1. With the
    /// default delays a call to a server that is down fails after about 6 s.
    int32_t attempts_max = policy::kAttemptsMax;
    /// Maximum number of attempts while servers refuse the request because of load, >= 1. The
    /// default retries until the deadline.
    int32_t overloaded_attempts_max = policy::kOverloadedAttemptsMax;
    /// Upper bound of the first random delay before a retry; it doubles with each retry up to
    /// `backoff_max`.
    absl::Duration backoff_initial = policy::kWaitFirst;
    absl::Duration backoff_max = policy::kWaitMax;
    /// Maximum number of requests of one Score call that are in flight at each server, 1 to 1024.
    int32_t max_inflight = policy::kInflightMax;
    /// Maximum size of hidden states and candidates in one request, in bytes, >= 4096; the server's
    /// limits apply too. The default is small enough that requests overlap, and large enough that
    /// the overhead per request is negligible.
    int64_t request_bytes = int64_t{8} << 20;
    /// Name under which the server shares its queue fairly, or the part of the caller's tenant if
    /// it demands tokens; empty means the peer address.
    std::string client_id = {};
    /// Time for which Score busy-polls for its response before its thread sleeps, >= 0; one thread
    /// of the client polls at a time. Polling saves the time of a wake-up for calls of few rows,
    /// and keeps a core busy. With zero, Score sleeps at once.
    absl::Duration busy_poll = absl::ZeroDuration();
    /// Allows different versions of the weights to score the rows of one call;
    /// ScoreResult::weights_versions lists them.
    bool mix_weights_versions = false;
    /// Transport of rows to a same-host server. If absent, the environment variable
    /// LOGPROBD_TRANSPORT decides, and without it kAuto applies. If the chosen transport is not
    /// available, calls fail with UNAVAILABLE. With several servers rows are sent inside requests,
    /// and Create returns INVALID_ARGUMENT for kSharedMemory and kCudaIpc.
    std::optional<TransportChoice> transport = {};
    /// Files for TLS to servers that run with --tls-cert. If absent, connections are plaintext.
    std::optional<Tls> tls = {};
    /// Token for servers that run with --tokens, sent with each call. If it is empty, none is sent.
    std::string token = {};
    /// Called with a message when a call has been retrying for 1 s, once per request. It runs on a
    /// thread of the library or of the caller and must return quickly. If it is empty, there is no
    /// message.
    std::function<void(const std::string& message)> on_wait = {};
  };

  /// Creates a client, which connects lazily: the first call, or WaitReady, reports an unreachable
  /// server. Returns INVALID_ARGUMENT with the name of an invalid option or TLS file.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const Options& options);

  /// Cancels the calls in flight and returns after the last callback.
  ~Client();

  /// Scores the rows and waits for the result. The first call also asks for the heads' limits. If
  /// the call is a single request, the calling thread receives the response itself, which saves a
  /// wake-up: prefer Score to ScoreAsync and a wait.
  ///
  /// Returns only when the library no longer reads `args.hidden`: after a timeout with a peer that
  /// stopped reading, this can take until the connection is closed (about 40 s).
  absl::StatusOr<ScoreResult> Score(const ScoreArgs& args);

  /// Behaves like Score, but does not wait. `done` is called once, on a thread of the library or,
  /// for bad arguments, before this returns. It must neither block nor destroy the Client.
  void ScoreAsync(const ScoreArgs& args, ScoreCallback done);

  /// Return the transport of most rows of the latest call, and why no faster transport was used (""
  /// if there is none).
  Transport transport() const;
  std::string transport_reason() const;

  /// Allocates memory that is shared with a same-host server: rows in it are scored without a copy.
  /// Returns ordinary memory if none can be shared, for example with several servers. Returns
  /// UNAVAILABLE if kSharedMemory is chosen and not available, or if the server does not answer. Do
  /// not change rows while they are scored.
  absl::StatusOr<RowBuffer> AllocateRows(int64_t bytes);

  /// Returns the heads and their limits. With several servers, the limits are the tightest of all
  /// servers.
  absl::StatusOr<ServerInfo> ListHeads();

  /// Returns the known state of each server, without asking it. The state is kUnknown until the
  /// first call.
  std::vector<ServerState> Servers() const;

  /// Makes the server, or one of several, compare its engine with double precision.
  absl::StatusOr<VerifyReport> Verify(const VerifyArgs& args);

  /// Returns whether the server takes scoring requests now (grpc.health.v1), or UNAVAILABLE if it
  /// cannot be reached. With several servers, returns true if one of them does, otherwise
  /// UNAVAILABLE; the message names each server and why.
  absl::StatusOr<bool> Ready();

  /// Waits until Ready() returns true. Returns DEADLINE_EXCEEDED with the last reason. Returns
  /// UNIMPLEMENTED and FAILED_PRECONDITION (heads that differ) at once.
  absl::Status WaitReady(absl::Duration timeout);

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::client
