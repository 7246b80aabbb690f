#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/score.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

using ScoreCallback = absl::AnyInvocable<void(absl::StatusOr<ScoreResult>) &&>;

/// A connection to a logprobd server, or to several that hold the same heads. Thread-safe: share
/// one.
///
/// With several, each request goes to the server with the fewest unanswered bytes of this client,
/// so that a slower one gets less; a large call uses all of them at once. A server that drains,
/// fails or cannot be reached is left alone at once, its requests are sent again elsewhere without
/// a wait, and it comes back after a pause that grows, when its health service says that it serves.
/// One that refuses for load is passed over for as long as it asks. While calls are made, each
/// server is asked for its health and heads every 10 s. Servers whose heads differ (vocabulary,
/// hidden size, dtype, scale, soft cap, bias) are refused.
///
/// All rows of a call are scored by one version of the weights: the pinned one, or the first that
/// is seen. An answer of another version is asked again where the first one is held; when no server
/// holds it any more, the call is begun again with the version that is there, at most 3 times.
///
/// Calls of any size are cut into requests within the server's limits, several in flight, and the
/// answers joined in order. Requests that the server was too busy for, or that met a broken
/// connection, are sent again (scoring has no side effects) after a random delay, never sooner than
/// the server asked.
///
/// Errors are absl::Status whose message says what to change:
///   INVALID_ARGUMENT     the arguments (field, value, limit); never retried.
///   NOT_FOUND            no head of that name.
///   FAILED_PRECONDITION  weights_version is not live, or the servers' heads differ (names both).
///   ABORTED              no version of the weights could score the whole call; names the versions
///                        and where they were seen.
///   RESOURCE_EXHAUSTED   the server stayed full through every retry.
///   UNAVAILABLE          no server there, or it is not ready; of several, none is: names each.
///   DEADLINE_EXCEEDED    the timeout passed.
///   UNIMPLEMENTED        another kind of server listens there.
///   CANCELLED            the Client was destroyed.
///   INTERNAL             the server failed, or broke the protocol.
class Client {
 public:
  struct Options {
    /// host:port (IPv6 in brackets), unix:///path or dns:///name:port; or several, separated by
    /// commas. dns:/// stands for a server at each A and AAAA record of the name, looked up every
    /// 30 s and after failures: a Kubernetes headless service, for instance.
    std::string address = "127.0.0.1:8470";
    /// Connections to each server, 1 to 64. One carries about 1.7 GB/s over loopback.
    int32_t channels = 4;
    /// Limit of a call, retries included, > 0.
    absl::Duration timeout = absl::Seconds(60);
    /// Most times a request is sent again, 0 to 100.
    int32_t retries = 8;
    /// Upper bound of the first random delay before a retry; doubles up to `backoff_max`.
    absl::Duration backoff_initial = absl::Milliseconds(50);
    absl::Duration backoff_max = absl::Seconds(5);
    /// Requests of one Score call that are in flight at once at each server, 1 to 1024.
    int32_t max_inflight = 8;
    /// Most hidden states and candidates of one request, in bytes, >= 4096; the server's limits
    /// hold too. Small enough that requests overlap, large enough that their overhead vanishes.
    int64_t request_bytes = int64_t{8} << 20;
    /// Sends the requests of Score as chunks of ScoreStream calls, at most one on each channel,
    /// instead of unary calls. For bulk work: the server slows a fast client down, where it would
    /// refuse unary requests. Results, retries and errors are the same.
    bool bulk_stream = false;
    /// Name under which the server shares its queue fairly; empty: the peer address.
    std::string client_id = {};
    /// How long Score looks for its answer before its thread goes to sleep, >= 0; one thread of the
    /// client at a time. For calls of few rows on idle cores: it spares the time that waking takes,
    /// and keeps a core busy. Zero: it sleeps at once.
    absl::Duration busy_poll = absl::ZeroDuration();
    /// Allow the rows of a call to be scored by different versions of the weights;
    /// ScoreResult::weights_versions lists them.
    bool mix_weights_versions = false;
    /// How rows travel to a server on this host. Absent: LOGPROBD_TRANSPORT of the environment,
    /// else kAuto. A way that is asked for and cannot be had makes calls UNAVAILABLE. To several
    /// servers rows travel in requests: kSharedMemory and kCudaIpc are INVALID_ARGUMENT.
    std::optional<TransportChoice> transport = {};
  };

  /// Connects lazily: an unreachable server shows at the first call, or in WaitReady.
  /// INVALID_ARGUMENT names the bad option.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const Options& options);

  /// Cancels what is in flight and returns after the last callback.
  ~Client();

  /// Scores and waits. The first call for a head also asks for its limits. The answer of a single
  /// request is taken up by the calling thread itself, which spares a wake-up: prefer it to
  /// ScoreAsync and a wait.
  ///
  /// Returns only when the library no longer reads `args.hidden`: after a timeout with a peer that
  /// stopped reading this can take until the connection is given up (about 40 s).
  absl::StatusOr<ScoreResult> Score(const ScoreArgs& args);

  /// As Score; `done` is called once, on a thread of the library or, for bad arguments, before this
  /// returns; it must not block and not destroy the Client.
  void ScoreAsync(const ScoreArgs& args, ScoreCallback done);

  /// How most rows of the latest call travelled, and why not by a shorter way ("" where there is
  /// none).
  Transport transport() const;
  std::string transport_reason() const;

  /// Memory that is shared with the server, if it is on this host: rows in it are scored without a
  /// copy. Ordinary memory where none can be shared, as with several servers; UNAVAILABLE then if
  /// kSharedMemory was chosen, and where the server, which is asked first, does not answer. Rows
  /// must not change while they are scored.
  absl::StatusOr<RowBuffer> AllocateRows(int64_t bytes);

  /// The heads served and their limits: of several servers the tightest.
  absl::StatusOr<ServerInfo> ListHeads();

  /// What is known of each server: state, why it is out, unanswered work, version seen. Asks
  /// nothing: a server is kUnknown until the first call.
  std::vector<ServerState> Servers() const;

  /// Lets the server, or one of several, compare its engine with double precision.
  absl::StatusOr<VerifyReport> Verify(const VerifyArgs& args);

  /// Whether the server takes scoring requests now (grpc.health.v1); UNAVAILABLE when unreachable.
  /// Of several: true when one does, else UNAVAILABLE, naming each and why.
  absl::StatusOr<bool> Ready();

  /// Waits until Ready() says true. DEADLINE_EXCEEDED says what it waited for; UNIMPLEMENTED and
  /// FAILED_PRECONDITION (heads that differ) come at once.
  absl::Status WaitReady(absl::Duration timeout);

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::client
