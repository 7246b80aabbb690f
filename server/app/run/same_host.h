#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/app/heads/plan.h"
#include "server/app/options/server_options.h"
#include "server/base/client_memory.h"
#include "server/metrics/metrics.h"
#include "server/transport/grpc_server.h"

namespace logprobd {

/// The memory that clients on the same host share with the engines. Must outlive the heads and the
/// gRPC server.
struct SameHostMemory {
  std::unique_ptr<HostPinning> pinning = std::make_unique<NoPinning>();
  std::unique_ptr<DeviceMemory> devices = nullptr;  ///< Null if CUDA IPC is off.
};

/// Creates the shared memory for the devices of all heads of `plan`. Returns FAILED_PRECONDITION if
/// --cuda-ipc is set but not possible.
absl::StatusOr<SameHostMemory> CreateSameHostMemory(const ServerOptions& options,
                                                    const ServerPlan& plan, Metrics& metrics);

/// Sets the gRPC server's options for clients on the same host. If `--local auto` finds no folder
/// for its sockets, they are turned off and a log line says so.
void SetSameHostOptions(const ServerOptions& options, const SameHostMemory& memory,
                        GrpcServer::Options& grpc);

/// Returns the address for GrpcServer::Options::admin. Returns UNAVAILABLE if `--admin auto` finds
/// no folder for its socket.
absl::StatusOr<std::string> AdminAddress(const ServerOptions& options);

/// Returns the folders that `auto` tries for its sockets, in this order: $XDG_RUNTIME_DIR,
/// /run/user/UID, and /tmp/logprobd-UID, which is created if necessary.
std::vector<std::string> SameHostFolders();

/// Returns a path for the Unix socket of a server with data port `port`, or with a random name if
/// `port` is 0. The path is in the first of `folders` that belongs to this user, gives other users
/// no access, and is writable. If there is none, returns UNAVAILABLE that says what is wrong with
/// each folder.
absl::StatusOr<std::string> AutoSocketPath(int port, const std::vector<std::string>& folders);

}  // namespace logprobd
