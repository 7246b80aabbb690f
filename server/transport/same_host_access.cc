#include "server/transport/same_host_access.h"

#include <fstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

/// Returns an id that all processes of this host share and that no other host has.
std::string BootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace

SameHostAccess::SameHostAccess(const Options& options)
    : devices_(options.devices),
      info_{.boot_id = BootId(),
            .grpc_path = options.grpc_path,
            .control_path = absl::StrCat(options.grpc_path, kControlSuffix),
            .shared_memory = options.regions.bytes_max > 0,
            .cuda_ipc = options.devices != nullptr} {}

absl::StatusOr<std::unique_ptr<SameHostAccess>> SameHostAccess::Create(const Options& options,
                                                                       Metrics& metrics) {
  std::unique_ptr<SameHostAccess> access(new SameHostAccess(options));
  LOGPROBD_ASSIGN_OR_RETURN(access->path_lock_, SocketPathLock::Take("--local", options.grpc_path));
  LOGPROBD_RETURN_IF_ERROR(CheckSocketPath("--local", options.grpc_path));
  LOGPROBD_ASSIGN_OR_RETURN(access->regions_,
                            SharedRegions::Create(options.regions, *options.pinning, metrics));
  LOGPROBD_ASSIGN_OR_RETURN(
      access->socket_, ControlSocket::Create(
                           {.path = access->info_.control_path, .cuda_ipc = access->info_.cuda_ipc},
                           *access->regions_));
  return access;
}

absl::StatusOr<HiddenPayload> SameHostAccess::Find(const SharedMemorySlice& slice) const {
  if (!info_.shared_memory) {
    return absl::FailedPreconditionError(
        "shared_memory: switched off on this server (--shared-memory-bytes 0); send the rows in "
        "the message");
  }
  return regions_->Find(slice);
}

absl::StatusOr<HiddenPayload> SameHostAccess::Find(const CudaIpcSlice& slice) const {
  if (devices_ == nullptr) {
    return absl::FailedPreconditionError(
        "cuda_ipc: switched off on this server (--cuda-ipc switches it on if the server has GPUs)");
  }
  if (!regions_->HasLease(slice.lease)) {
    return absl::NotFoundError("cuda_ipc.lease: no such lease; its connection has ended");
  }
  return devices_->Open(slice.memory);
}

}  // namespace logprobd
