#include "server/transport/audit.h"

#include <memory>
#include <utility>
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
  const LogField fields[] = {{"connection", flag},
                             {"user", static_cast<int64_t>(process.user)},
                             {"process", static_cast<int64_t>(process.process)}};
  LogAudit(LogLevel::kInfo, fields);
}

void AuditRefusedConnection(absl::string_view flag, const std::optional<SocketPeer>& process,
                            LogLimiter& limiter) {
  const std::optional<int64_t> lines_suppressed = limiter.Admit();
  if (!lines_suppressed.has_value()) return;
  const LogField fields[] = {
      {"connection", flag},
      {"user", process.has_value() ? static_cast<int64_t>(process->user) : -1},
      {"process", process.has_value() ? static_cast<int64_t>(process->process) : -1},
      {"outcome", absl::StatusCodeToString(absl::StatusCode::kPermissionDenied)},
      {"lines_suppressed", *lines_suppressed}};
  LogAudit(LogLevel::kWarning, fields);
}

ChangeAudit::ChangeAudit(Caller caller, absl::string_view method, bool is_required)
    : caller_(std::move(caller)), method_(method), is_required_(is_required) {}

absl::Status ChangeAudit::Begin() const {
  if (!is_required_) return absl::OkStatus();
  const absl::Status written = LogAuditAndWait(LogLevel::kInfo, Fields("ASKED"));
  return written.ok() ? written
                      : absl::UnavailableError(absl::StrCat(
                            written.message(), ", so nothing was changed (--audit-required)"));
}

void ChangeAudit::End(const absl::Status& outcome) const {
  std::vector<LogField> fields = Fields(absl::StatusCodeToString(outcome.code()));
  if (!outcome.ok()) fields.emplace_back("reason", outcome.message());
  LogAudit(outcome.ok() ? LogLevel::kInfo : LogLevel::kWarning, fields);
}

std::vector<LogField> ChangeAudit::Fields(absl::string_view outcome) const {
  std::vector<LogField> fields = {{"method", method_},
                                  {"token", caller_.token},
                                  {"certificate", caller_.certificate},
                                  {"peer", caller_.peer}};
  const auto add_known = [&fields](absl::string_view name, absl::string_view value) {
    if (!value.empty()) fields.emplace_back(name, value);
  };
  add_known("head", change_.head);
  add_known("version", change_.version == 0 ? "" : absl::StrCat(change_.version));
  add_known("path", change_.path);
  add_known("sha256", change_.sha256);
  fields.emplace_back("outcome", outcome);
  return fields;
}

}  // namespace logprobd
