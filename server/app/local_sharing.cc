#include "server/app/local_sharing.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/app/local_path.h"
#include "server/base/errors.h"
#include "server/base/listen_address.h"
#include "server/base/log.h"
#include "server/engine/engines.h"

namespace logprobd {
namespace {

constexpr char kAuto[] = "auto";

/// The engines of all heads as one: whatever a client shares may go to any of them.
EnginePlan Joined(const ServerPlan& plan) {
  EnginePlan joined;
  for (const ServingPlan& head : plan.heads) {
    if (head.engine.device == Device::kCuda) {
      joined.device = Device::kCuda;
      joined.layout.insert(joined.layout.end(), head.engine.layout.begin(),
                           head.engine.layout.end());
    }
  }
  return joined;
}

}  // namespace

absl::StatusOr<LocalSharing> CreateLocalSharing(const ServerOptions& options,
                                                const ServerPlan& plan, Metrics& metrics) {
  const EnginePlan engines = Joined(plan);
  LocalSharing sharing;
  sharing.pinning = CreateHostPinning(engines);
  if (options.cuda_ipc) {
    LOGPROBD_ASSIGN_OR_RETURN(sharing.devices, CreateDeviceMemory(engines, metrics));
  }
  return sharing;
}

void SetLocalOptions(const ServerOptions& options, const LocalSharing& sharing,
                     GrpcServer::Options& grpc) {
  grpc.local = options.local;
  grpc.pinning = sharing.pinning.get();
  grpc.devices = sharing.devices.get();
  grpc.shared_memory.bytes_max = options.shared_memory_bytes;
  grpc.shared_memory.region_bytes_max = options.region_bytes;
  grpc.shared_memory.lease_bytes_max =
      static_cast<int64_t>(options.client_share * static_cast<double>(options.shared_memory_bytes));
  if (options.local != kAuto) {
    return;
  }
  grpc.local_is_optional = true;
  const absl::StatusOr<ListenAddress> data = ParseListenAddress("--listen", options.listen);
  absl::StatusOr<std::string> path = AutoLocalPath(data.ok() ? data->port : 0, LocalFolders());
  if (!path.ok()) {
    LogInfo("no local socket", {{"reason", path.status().message()}});
  }
  grpc.local = path.ok() ? *std::move(path) : "";
}

}  // namespace logprobd
