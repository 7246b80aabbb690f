#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/client_memory.h"
#include "server/base/score_request.h"
#include "server/metrics/metrics.h"
#include "server/transport/control_socket.h"
#include "server/transport/shared_regions.h"

namespace logprobd {

/// What clients on this host use beside gRPC: the control socket, and the memory that their
/// requests name. Thread-safe.
class SameHostAccess {
 public:
  struct Options {
    /// Path of the Unix socket of gRPC, absolute; the control socket lies beside it, with
    /// kControlSuffix.
    std::string grpc_path;
    SharedRegions::Options regions;
    HostPinning* pinning = &NoPinning::Shared();
    DeviceMemory* devices = nullptr;  ///< Null: no CUDA IPC.
  };

  static constexpr char kControlSuffix[] = ".control";

  /// What is to be known to find it.
  struct Facts {
    std::string boot_id;  ///< Of the host since its start; empty if the system does not say.
    std::string grpc_path;
    std::string control_path;
    bool shared_memory = false;
    bool cuda_ipc = false;
  };

  /// Listens. Errors are those of ControlSocket::Create. References must outlive it, and `pinning`
  /// and `metrics` every payload.
  static absl::StatusOr<std::unique_ptr<SameHostAccess>> Create(const Options& options,
                                                                Metrics& metrics);

  const Facts& facts() const { return facts_; }

  /// The payload of a request that has a slice: it keeps the memory until it is let go of. A slice
  /// of a GPU's memory that is not mapped yet is mapped first, in about 0.3 ms. Errors:
  ///   FAILED_PRECONDITION  what the slice asks for is switched off; as DeviceMemory::Open
  ///   NOT_FOUND            no such region or lease
  ///   INVALID_ARGUMENT     beyond the region; as DeviceMemory::Open
  ///   RESOURCE_EXHAUSTED   as DeviceMemory::Open
  absl::StatusOr<HiddenPayload> Find(const ScoreRequest& request) const;

  /// Ends all leases. Once, when no request comes any more.
  void Stop() { socket_ = nullptr; }

 private:
  explicit SameHostAccess(const Options& options);

  DeviceMemory* const devices_;
  Facts facts_;
  std::unique_ptr<SharedRegions> regions_;
  std::unique_ptr<ControlSocket> socket_;
};

}  // namespace logprobd
