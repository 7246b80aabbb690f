#include "server/transport/audit.h"

#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
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
  if (!lines_suppressed.has_value()) return;
  LogAlways(LogLevel::kWarning, "audit",
            {{"connection", flag},
             {"user", process.has_value() ? static_cast<int64_t>(process->user) : -1},
             {"process", process.has_value() ? static_cast<int64_t>(process->process) : -1},
             {"outcome", absl::StatusCodeToString(absl::StatusCode::kPermissionDenied)},
             {"lines_suppressed", *lines_suppressed}});
}

void Audit(const Caller& caller, const AuditedChange& change, const absl::Status& outcome) {
  std::vector<LogField> fields = {{"method", change.method},
                                  {"token", caller.token},
                                  {"certificate", caller.certificate},
                                  {"peer", caller.peer}};
  const auto add_known = [&fields](absl::string_view name, absl::string_view value) {
    if (!value.empty()) fields.emplace_back(name, value);
  };
  add_known("head", change.head);
  add_known("version", change.version == 0 ? "" : absl::StrCat(change.version));
  add_known("path", change.path);
  add_known("sha256", change.sha256);
  fields.emplace_back("outcome", absl::StatusCodeToString(outcome.code()));
  add_known("reason", outcome.message());
  LogAlways(outcome.ok() ? LogLevel::kInfo : LogLevel::kWarning, "audit", fields);
}

}  // namespace logprobd
