#include "server/transport/access_processor.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "grpc/grpc_security_constants.h"
#include "server/transport/grpc_status.h"

namespace logprobd {
namespace {

absl::string_view ViewOf(const grpc::string_ref& text) { return {text.data(), text.size()}; }

absl::string_view ValueOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                          const char* key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? absl::string_view() : ViewOf(found->second);
}

void AppendValues(const grpc::AuthContext& context, const char* property,
                  std::vector<absl::string_view>& values) {
  for (const grpc::string_ref& value : context.FindPropertyValues(property)) {
    values.push_back(ViewOf(value));
  }
}

/// Returns the scope that a method needs, or nothing if everyone may call it.
std::optional<Scope> ScopeOf(absl::string_view path) {
  if (absl::StartsWith(path, "/grpc.health.v1.Health/")) {
    return std::nullopt;
  }
  if (path == "/logprobd.v1.Scoring/Verify") {
    return Scope::kVerify;
  }
  if (absl::StartsWith(path, "/logprobd.v1.Scoring/")) {
    return Scope::kScore;
  }
  return absl::StartsWith(path, "/logprobd.v1.Weights/") ? Scope::kAdmin : Scope::kAny;
}

}  // namespace

AccessProcessor::AccessProcessor(std::shared_ptr<const AccessList> access, Metrics& metrics)
    : access_(std::move(access)), refusals_(metrics) {}

grpc::Status AccessProcessor::Process(const InputMetadata& metadata, grpc::AuthContext* context,
                                      OutputMetadata* /*consumed*/, OutputMetadata* /*response*/) {
  const absl::string_view path = ValueOf(metadata, ":path");
  const std::optional<Scope> scope = ScopeOf(path);
  if (!scope.has_value()) {
    return grpc::Status::OK;
  }
  const absl::Status status =
      access_->Check(CredentialsOf(metadata, context), *scope, absl::Now()).status();
  if (status.ok()) {
    return grpc::Status::OK;
  }
  refusals_.Record(path, status);
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
    if (names.empty()) {
      AppendValues(*context, GRPC_X509_CN_PROPERTY_NAME, names);
    }
  }
  return caller;
}

}  // namespace logprobd
