#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/client_memory.h"
#include "server/base/clock.h"
#include "server/base/served_head.h"
#include "server/base/weight_store.h"
#include "server/metrics/metrics.h"
#include "server/transport/access_list.h"
#include "server/transport/answer_budget.h"
#include "server/transport/shared_regions.h"
#include "server/transport/tls_files.h"

namespace logprobd {

/// The gRPC listeners: the data listener (TCP and optionally a Unix socket) and the admin listener.
/// Both have the health service and, if it is enabled, reflection.
class GrpcServer {
 public:
  struct Options {
    /// Address host:port of the data listener. Port 0 selects a free port.
    std::string listen = "127.0.0.1:8470";
    /// Path of a Unix socket; the control socket is next to it. If empty, there is no Unix socket.
    std::string unix_socket;
    /// If true and the Unix socket cannot be opened, the server logs this and serves without it.
    bool unix_socket_is_optional = false;
    SharedRegions::Options shared_memory;
    HostPinning* pinning = &NoPinning::Shared();
    DeviceMemory* devices = nullptr;  ///< Null disables CUDA IPC.
    /// Address of the admin listener, host:port or unix:PATH. If empty, there is no admin listener.
    /// Only the server's own user and root can connect to a Unix socket.
    std::string admin;
    /// The callers that the server accepts; null if they need no tokens.
    std::shared_ptr<const AccessList> access;
    /// Refuses a change of weights whose audit line cannot be written.
    bool audit_required = false;
    /// Files for TLS on TCP, which must outlive the server; null: TCP is plaintext. Unix sockets
    /// are always plaintext.
    const TlsFiles* tls = nullptr;
    /// Allows listeners on addresses other than loopback that CheckReachable refuses.
    bool insecure = false;
    bool reflection = false;
    /// Maximum size of a message in bytes.
    int64_t message_bytes_max = int64_t{64} << 20;
    /// Number of bytes for messages of all connections that are being received or queued (gRPC
    /// ResourceQuota).
    int64_t receive_bytes_max = int64_t{2} << 30;
    /// Maximum number of concurrent calls of a connection.
    int32_t streams_max = 256;
    /// Time without calls after which a connection is closed, in milliseconds, and the age at which
    /// it is closed once its calls have ended. Clients reconnect without an error.
    int32_t connection_idle_ms_max = 10 * 60'000;
    int32_t connection_age_ms_max = 60 * 60'000;
    /// Limits of the responses that clients have not received yet.
    AnswerBudget::Options answers;
    std::string version;
  };

  /// Binds the addresses and serves. Health is NOT_SERVING until SetServing(true). Returns
  /// INVALID_ARGUMENT for an invalid address or limit, FAILED_PRECONDITION for an address
  /// that CheckReachable refuses, and UNAVAILABLE if a port is in use.
  /// References must outlive the server; `metrics` and `pinning` must also outlive the requests
  /// that it submitted. The admin listener serves `weights`; if it is null, there is no Weights
  /// service.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Create(const Options& options,
                                                            const HeadRegistry& heads,
                                                            Metrics& metrics, const Clock& clock,
                                                            WeightStore* weights = nullptr);
  ~GrpcServer();

  /// Returns the port of the data listener.
  int port() const;
  /// Returns the address of the admin listener with the port that it has bound, or an empty string.
  std::string admin_address() const;
  /// Returns the path of the Unix socket, or an empty string.
  std::string unix_socket_path() const;

  /// Sets the status that grpc.health.v1 returns for "" and "logprobd.v1.Scoring".
  void SetServing(bool serving);

  /// Changes answer_bytes_max and answer_client_share of Options.
  void SetAnswerLimits(int64_t bytes_max, double client_share);

  /// Cancels calls whose clients do not take their responses (see UnreadAnswers), and returns their
  /// number. Must be called often, from one thread.
  int CancelUnreadAnswers();

  /// Refuses new calls, waits at most `grace` for the calls in flight, including Verify, and
  /// cancels the rest, except loads of weights, which the destructor cancels. Idempotent.
  void Shutdown(absl::Duration grace);

 private:
  struct Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
