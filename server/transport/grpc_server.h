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
#include "server/transport/shared_regions.h"

namespace logprobd {

/// The gRPC listeners: data (TCP), local (Unix socket) and admin, with health and, by flag,
/// reflection.
class GrpcServer {
 public:
  struct Options {
    /// host:port; port 0 takes a free one.
    std::string listen = "127.0.0.1:8470";
    /// Path of a Unix socket, with the control socket of local_socket.h beside it; empty: none.
    std::string local;
    /// Serve without it, with a line of the log, where it cannot be had.
    bool unix_socket_is_optional = false;
    SharedRegions::Options shared_memory;
    HostPinning* pinning = &NoPinning::Shared();
    DeviceMemory* devices = nullptr;  ///< For CUDA IPC; null: off.
    /// host:port of the admin listener; empty: none.
    std::string admin;
    /// Allows a listener on a public address without TLS.
    bool insecure = false;
    bool reflection = false;
    int64_t message_bytes_max = int64_t{64} << 20;
    /// Memory for messages being received or queued, over all connections (gRPC ResourceQuota).
    int64_t receive_bytes_max = int64_t{2} << 30;
    int32_t streams_max = 256;
    /// Bytes of answers, from the queueing of their requests until clients have taken them, in all.
    int64_t answer_bytes_max = int64_t{1} << 30;
    /// Share of answer_bytes_max that one client may hold, above 0, at most 1.
    double answer_client_share = 0.5;
    std::string version;
  };

  /// Binds and serves; health says NOT_SERVING until SetServing(true). Errors: INVALID_ARGUMENT (an
  /// address), FAILED_PRECONDITION (public address without `insecure`), UNAVAILABLE (port in use).
  /// References must outlive the server; `metrics` and `pinning` also the requests that it passed
  /// on. `weights` is served on the admin listener; null: there is no Weights service.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Create(const Options& options,
                                                            const HeadRegistry& heads,
                                                            Metrics& metrics, const Clock& clock,
                                                            WeightStore* weights = nullptr);
  ~GrpcServer();

  /// Port of the data listener.
  int port() const;
  /// Port of the admin listener, or 0.
  int admin_port() const;
  /// Path of the Unix socket; empty: none.
  std::string unix_socket_path() const;

  /// What grpc.health.v1 answers for "" and "logprobd.v1.Scoring".
  void SetServing(bool serving);

  /// As answer_bytes_max and answer_client_share of Options, from now on.
  void SetAnswerLimits(int64_t bytes_max, double client_share);

  /// Refuses new calls, lets calls in flight, Verify included, finish for `grace`, then cancels
  /// them. Idempotent.
  void Shutdown(absl::Duration grace);

 private:
  struct Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
