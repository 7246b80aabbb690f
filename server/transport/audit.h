#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

/// A change of weights, as far as its call has told it. Lines leave a member out that is empty or 0
/// because it does not apply or is not known.
struct AuditedChange {
  std::string head;  ///< Its name, also if the call names none because it is the only one.
  uint64_t version = 0;
  std::string path;
  std::string sha256;
};

/// The lines of one call that changes weights, at every log level. They name the caller, the change
/// and its outcome. A call has one line, however it ends, and one more before its change if lines
/// are required. Not thread-safe.
class ChangeAudit {
 public:
  /// `method` must have static lifetime.
  ChangeAudit(Caller caller, absl::string_view method, bool is_required);

  /// Must be called before anything changes. If lines are required, writes one whose outcome is
  /// ASKED, and returns UNAVAILABLE if it cannot be written.
  absl::Status Begin() const;
  /// Writes the line of the call's end. It is a warning if the change failed, and then the only
  /// line about that.
  void End(const absl::Status& outcome) const;

  AuditedChange& change() { return change_; }

 private:
  std::vector<LogField> Fields(absl::string_view outcome) const;

  const Caller caller_;
  const absl::string_view method_;
  const bool is_required_;
  AuditedChange change_;
};

}  // namespace logprobd
