#include "server/transport/access_processor.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "grpc/grpc_security_constants.h"
#include "server/transport/grpc_status.h"
#include "server/transport/health_service.h"

namespace logprobd {
namespace {

absl::string_view ViewOf(const grpc::string_ref& text) { return {text.data(), text.size()}; }

std::optional<absl::string_view> ValueOf(
    const std::multimap<grpc::string_ref, grpc::string_ref>& metadata, const char* key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::nullopt;
  return ViewOf(found->second);
}

void AppendValues(const grpc::AuthContext& context, const char* property,
                  std::vector<absl::string_view>& values) {
  for (const grpc::string_ref& value : context.FindPropertyValues(property)) {
    values.push_back(ViewOf(value));
  }
}

/// Returns the scope that a method needs, or nothing if everyone may call it.
std::optional<Scope> ScopeOf(absl::string_view path) {
  if (HealthService::Serves(path)) return std::nullopt;
  if (path == "/logprobd.v1.Scoring/Verify") return Scope::kVerify;
  if (absl::StartsWith(path, "/logprobd.v1.Scoring/")) return Scope::kScore;
  return absl::StartsWith(path, "/logprobd.v1.Weights/") ? Scope::kAdmin : Scope::kAny;
}

}  // namespace

AccessProcessor::AccessProcessor(std::shared_ptr<const AccessList> access, Metrics& metrics)
    : access_(std::move(access)), refusals_(metrics) {}

grpc::Status AccessProcessor::Process(const InputMetadata& metadata, grpc::AuthContext* context,
                                      OutputMetadata* /*consumed*/, OutputMetadata* /*response*/) {
  const absl::string_view path = ValueOf(metadata, ":path").value_or("");
  const std::optional<Scope> scope = ScopeOf(path);
  if (!scope.has_value()) return grpc::Status::OK;
  const Credentials caller = CredentialsOf(metadata, context);
  const absl::Status status = access_->Check(caller, *scope).status();
  if (status.ok()) return grpc::Status::OK;
  refusals_.Record(
      path, [&] { return CallerOf(caller, access_.get(), /*peer=*/""); }, status);
  return ToGrpcStatus(status);
}

Credentials CredentialsOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                          const grpc::AuthContext* context) {
  Credentials caller;
  caller.authorization = ValueOf(metadata, "authorization");
  if (context != nullptr) {
    std::vector<absl::string_view>& names = caller.certificate_names;
    AppendValues(*context, GRPC_PEER_DNS_PROPERTY_NAME, names);
    AppendValues(*context, GRPC_PEER_URI_PROPERTY_NAME, names);
    // gRPC lists alternative names of all kinds here, also those whose text it does not give.
    if (context->FindPropertyValues(GRPC_X509_SAN_PROPERTY_NAME).empty()) {
      AppendValues(*context, GRPC_X509_CN_PROPERTY_NAME, names);
    }
  }
  return caller;
}

}  // namespace logprobd
