#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"
#include "server/base/log.h"
#include "server/transport/access_list.h"
#include "server/transport/sockets.h"

namespace logprobd {

/// Returns the caller of a call that an AccessProcessor of `access`, unless it is null, has
/// accepted.
Caller CallerOf(const grpc::CallbackServerContext& context, const AccessList* access);

/// Writes a line that names the process at the other end of a new connection to the Unix socket of
/// `flag`, at every log level.
void AuditConnection(absl::string_view flag, const SocketPeer& process);

/// Writes such a line for a connection that was refused since its process belongs to another user,
/// or since the system does not know it (nullopt), if `limiter` admits the line.
void AuditRefusedConnection(absl::string_view flag, const std::optional<SocketPeer>& process,
                            LogLimiter& limiter);

/// A change of weights that a caller has asked for. The line leaves a member out that is empty or 0
/// because it does not apply or is not known.
struct AuditedChange {
  absl::string_view method;
  std::string head;  ///< Its name, also if the call names none because it is the only one.
  uint64_t version = 0;
  std::string path;
  std::string sha256;
};

/// Writes a line that names the caller, the change and its outcome, at every log level. It is a
/// warning if the change failed, and then the only line about that.
void Audit(const Caller& caller, const AuditedChange& change, const absl::Status& outcome);

}  // namespace logprobd
