#include "server/transport/token_processor.h"

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/transport/grpc_status.h"

namespace logprobd {
namespace {

constexpr char kProperty[] = "logprobd_token";

absl::string_view ValueOf(const grpc::AuthMetadataProcessor::InputMetadata& metadata,
                          const char* key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? absl::string_view()
                                 : absl::string_view(found->second.data(), found->second.size());
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

TokenProcessor::TokenProcessor(std::shared_ptr<const AccessTokens> tokens, Metrics& metrics)
    : tokens_(std::move(tokens)), refusals_(metrics) {}

grpc::Status TokenProcessor::Process(const InputMetadata& metadata, grpc::AuthContext* context,
                                     OutputMetadata* consumed, OutputMetadata* /*response*/) {
  const absl::string_view path = ValueOf(metadata, ":path");
  const std::optional<Scope> scope = ScopeOf(path);
  if (!scope.has_value()) {
    return grpc::Status::OK;
  }
  const absl::string_view authorization = ValueOf(metadata, "authorization");
  const absl::StatusOr<std::shared_ptr<const AccessToken>> token =
      tokens_->Check(authorization, *scope, absl::Now());
  if (!token.ok()) {
    refusals_.Record(path, token.status());
    return ToGrpcStatus(token.status());
  }
  consumed->emplace("authorization", std::string(authorization));  // services never see it
  context->AddProperty(kProperty, (*token)->id);
  return grpc::Status::OK;
}

std::string TokenIdOf(const grpc::AuthContext* context) {
  if (context == nullptr) {
    return "";
  }
  const std::vector<grpc::string_ref> ids = context->FindPropertyValues(kProperty);
  return ids.empty() ? "" : std::string(ids.front().data(), ids.front().size());
}

}  // namespace logprobd
