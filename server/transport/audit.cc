#include "server/transport/audit.h"

#include "server/base/log.h"
#include "server/transport/token_processor.h"

namespace logprobd {

Caller CallerOf(const grpc::CallbackServerContext& context) {
  std::string token_id = TokenIdOf(context.auth_context().get());
  return {.token_id = token_id.empty() ? "none" : std::move(token_id), .peer = context.peer()};
}

void AuditConnection(absl::string_view flag, const SocketPeer& process) {
  LogAlways("audit", {{"connection", flag},
                      {"user", static_cast<int64_t>(process.user)},
                      {"process", static_cast<int64_t>(process.process)}});
}

void Audit(const Caller& caller, const AuditedChange& change, const absl::Status& outcome) {
  LogAlways("audit", {{"method", change.method},
                      {"token", caller.token_id},
                      {"peer", caller.peer},
                      {"head", change.head},
                      {"version", change.version},
                      {"path", change.path},
                      {"sha256", change.sha256},
                      {"outcome", absl::StatusCodeToString(outcome.code())},
                      {"reason", outcome.message()}});
}

}  // namespace logprobd
