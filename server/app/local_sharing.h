#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/app/plan.h"
#include "server/app/server_options.h"
#include "server/base/client_memory.h"
#include "server/metrics/metrics.h"
#include "server/transport/grpc_server.h"

namespace logprobd {

/// What clients on this host share with the engines. Must outlive the heads and the gRPC server.
struct LocalSharing {
  std::unique_ptr<HostPinning> pinning = std::make_unique<NoPinning>();
  std::unique_ptr<DeviceMemory> devices = nullptr;  ///< Null: no CUDA IPC.
};

/// For the devices of all heads of `plan`. FAILED_PRECONDITION when `--cuda-ipc` cannot be had.
absl::StatusOr<LocalSharing> CreateLocalSharing(const ServerOptions& options,
                                                const ServerPlan& plan, Metrics& metrics);

/// Sets what of the gRPC server's options concerns clients on this host. Where `--local auto` finds
/// no place for its sockets there are none, with a line of the log.
void SetLocalOptions(const ServerOptions& options, const LocalSharing& sharing,
                     GrpcServer::Options& grpc);

}  // namespace logprobd
