#include "server/transport/audit.h"

#include <memory>

#include "server/transport/access_processor.h"

namespace logprobd {

Caller CallerOf(const grpc::CallbackServerContext& context, const AccessList* access) {
  const std::shared_ptr<const grpc::AuthContext> connection = context.auth_context();
  return CallerOf(CredentialsOf(context.client_metadata(), connection.get()), access,
                  context.peer());
}

void AuditConnection(absl::string_view flag, const SocketPeer& process) {
  LogAlways("audit", {{"connection", flag},
                      {"user", static_cast<int64_t>(process.user)},
                      {"process", static_cast<int64_t>(process.process)}});
}

void AuditRefusedConnection(absl::string_view flag, const std::optional<SocketPeer>& process,
                            LogLimiter& limiter) {
  const std::optional<int64_t> lines_suppressed = limiter.Admit();
  if (!lines_suppressed.has_value()) {
    return;
  }
  LogAlways(LogLevel::kWarning, "audit",
            {{"connection", flag},
             {"user", process.has_value() ? static_cast<int64_t>(process->user) : -1},
             {"process", process.has_value() ? static_cast<int64_t>(process->process) : -1},
             {"outcome", absl::StatusCodeToString(absl::StatusCode::kPermissionDenied)},
             {"lines_suppressed", *lines_suppressed}});
}

void Audit(const Caller& caller, const AuditedChange& change, const absl::Status& outcome) {
  LogAlways("audit", {{"method", change.method},
                      {"token", caller.token},
                      {"certificate", caller.certificate},
                      {"peer", caller.peer},
                      {"head", change.head},
                      {"version", change.version},
                      {"path", change.path},
                      {"sha256", change.sha256},
                      {"outcome", absl::StatusCodeToString(outcome.code())},
                      {"reason", outcome.message()}});
}

}  // namespace logprobd
