#include "server/app/run/same_host.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/errors.h"
#include "server/base/listen_address.h"
#include "server/base/log.h"
#include "server/engine/engines.h"

namespace logprobd {
namespace {

/// Returns one plan with the GPUs of all heads, because a client's memory may go to any head.
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

constexpr mode_t kOwnerOnly = S_IRWXU;
constexpr mode_t kOthers = S_IRWXG | S_IRWXO;

/// Returns the path of a private folder in /tmp, to which other users may also write.
std::string FolderInTmp() { return absl::StrCat("/tmp/logprobd-", geteuid()); }

/// Returns the reason why a folder is not usable, or an empty string if it is usable.
std::string Fault(const std::string& folder) {
  if (!absl::StartsWith(folder, "/")) return "it is not an absolute path";
  struct stat info = {};
  // lstat does not follow links: in /tmp a link could belong to another user.
  if (lstat(folder.c_str(), &info) != 0) return std::strerror(errno);
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid()) return "it is not a folder of this user";
  if ((info.st_mode & kOthers) != 0) return "other users have access to it";
  return access(folder.c_str(), W_OK | X_OK) == 0 ? "" : std::strerror(errno);
}

std::string NameOf(int port) {
  if (port != 0) return absl::StrCat("logprobd-", port, ".sock");
  uint32_t random = 0;
  (void)!getrandom(&random, sizeof(random), 0);
  return absl::StrCat("logprobd-", absl::Hex(random, absl::kZeroPad8), ".sock");
}

/// Returns the port of --listen, which may be 0.
int PortOf(const ServerOptions& options) {
  const absl::StatusOr<ListenAddress> data = ParseListenAddress("--listen", options.listen);
  return data.ok() ? data->port : 0;
}

}  // namespace

absl::StatusOr<SameHostMemory> CreateSameHostMemory(const ServerOptions& options,
                                                    const ServerPlan& plan, Metrics& metrics) {
  const EnginePlan engines = Joined(plan);
  SameHostMemory memory;
  memory.pinning = CreateHostPinning(engines);
  if (options.cuda_ipc) {
    LOGPROBD_ASSIGN_OR_RETURN(memory.devices, CreateDeviceMemory(engines, metrics));
  }
  return memory;
}

void SetSameHostOptions(const ServerOptions& options, const SameHostMemory& memory,
                        GrpcServer::Options& grpc) {
  grpc.unix_socket = options.local;
  grpc.pinning = memory.pinning.get();
  grpc.devices = memory.devices.get();
  grpc.shared_memory.bytes_max = options.shared_memory_bytes;
  grpc.shared_memory.region_bytes_max = options.region_bytes;
  grpc.shared_memory.lease_bytes_max =
      static_cast<int64_t>(options.client_share * static_cast<double>(options.shared_memory_bytes));
  if (options.local != kAutoPath) return;
  grpc.unix_socket_is_optional = true;
  absl::StatusOr<std::string> path = AutoSocketPath(PortOf(options), SameHostFolders());
  if (!path.ok()) {
    LogInfo("the sockets for clients on this host are off", {{"reason", path.status().message()}});
  }
  grpc.unix_socket = path.ok() ? *std::move(path) : "";
}

absl::StatusOr<std::string> AdminAddress(const ServerOptions& options) {
  if (options.admin != kAutoPath) return options.admin;
  absl::StatusOr<std::string> path = AutoSocketPath(PortOf(options), SameHostFolders());
  LOGPROBD_RETURN_IF_ERROR(WithContext(path.status(), "--admin auto: give unix:PATH"));
  return absl::StrCat("unix:", *path, ".admin");
}

std::vector<std::string> SameHostFolders() {
  std::vector<std::string> folders;
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime != 0) {
    folders.emplace_back(runtime);
  }
  folders.push_back(absl::StrCat("/run/user/", geteuid()));
  folders.push_back(FolderInTmp());
  return folders;
}

absl::StatusOr<std::string> AutoSocketPath(int port, const std::vector<std::string>& folders) {
  std::vector<std::string> reasons;
  for (const std::string& folder : folders) {
    if (folder == FolderInTmp()) {
      (void)mkdir(folder.c_str(), kOwnerOnly);  // Fault checks the result.
    }
    const std::string reason = Fault(folder);
    if (reason.empty()) return absl::StrCat(folder, "/", NameOf(port));
    reasons.push_back(absl::StrCat(folder, ": ", reason));
  }
  return absl::UnavailableError(absl::StrJoin(reasons, "; "));
}

}  // namespace logprobd
