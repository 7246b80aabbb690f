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

/// Provides what clients on this host use in addition to gRPC: the control socket, and the memory
/// that their requests name. Thread-safe.
class SameHostAccess {
 public:
  struct Options {
    /// Absolute path of the Unix socket of gRPC. The control socket has the same path with
    /// kControlSuffix appended.
    std::string grpc_path;
    SharedRegions::Options regions;
    HostPinning* pinning = &NoPinning::Shared();
    DeviceMemory* devices = nullptr;  ///< Null disables CUDA IPC.
  };

  static constexpr char kControlSuffix[] = ".control";

  /// The data that ListHeads returns, so that clients find the sockets.
  struct Info {
    std::string boot_id;  ///< Identifies a boot of this host, or empty if the system has no id.
    std::string grpc_path;
    std::string control_path;
    bool shared_memory = false;
    bool cuda_ipc = false;
  };

  /// Opens the control socket, and keeps the right to `grpc_path` until Stop. Returns the
  /// errors of SocketPathLock::Take, CheckSocketPath and ControlSocket::Create. References must
  /// outlive the result, and `pinning` and `metrics` must also outlive every payload.
  static absl::StatusOr<std::unique_ptr<SameHostAccess>> Create(const Options& options,
                                                                Metrics& metrics);

  const Info& info() const { return info_; }

  /// Returns the bytes of a slice as a payload that keeps their memory alive. The first slice of
  /// an allocation in a GPU's memory maps it, which takes about 0.3 ms. Errors:
  ///   FAILED_PRECONDITION  this kind of slice is switched off, or an error of DeviceMemory::Open
  ///   NOT_FOUND            the region or the lease does not exist
  ///   INVALID_ARGUMENT     the slice exceeds the region, or an error of DeviceMemory::Open
  ///   RESOURCE_EXHAUSTED   an error of DeviceMemory::Open
  absl::StatusOr<HiddenPayload> Find(const SharedMemorySlice& slice) const;
  absl::StatusOr<HiddenPayload> Find(const CudaIpcSlice& slice) const;

  /// Copies bytes [offset, offset + out.size()) of a slice in a GPU's memory to the host. Returns
  /// INTERNAL if the copy fails.
  absl::Status CopyToHost(const HiddenPayload& payload, int64_t offset,
                          absl::Span<std::byte> out) const {
    return devices_->CopyToHost(payload, offset, out);
  }

  /// Closes all leases and gives up the right to `grpc_path`. Must be called once, after the last
  /// request and when nothing listens at `grpc_path` any more.
  void Stop() {
    socket_ = nullptr;
    path_lock_ = nullptr;
  }

 private:
  explicit SameHostAccess(const Options& options);

  DeviceMemory* const devices_;
  Info info_;
  std::unique_ptr<SocketPathLock> path_lock_;
  std::unique_ptr<SharedRegions> regions_;
  std::unique_ptr<ControlSocket> socket_;
};

}  // namespace logprobd
