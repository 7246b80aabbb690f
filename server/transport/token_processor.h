#pragma once

#include <memory>
#include <string>

#include "grpcpp/security/auth_context.h"
#include "grpcpp/security/auth_metadata_processor.h"
#include "server/metrics/metrics.h"
#include "server/transport/access_tokens.h"

namespace logprobd {

/// Refuses calls without a token that has the scope of their method. gRPC calls it when the
/// metadata of a call has arrived and before it reads a message, so that a refused call buffers
/// nothing. Health needs no token.
class TokenProcessor final : public grpc::AuthMetadataProcessor {
 public:
  /// `metrics` must outlive the processor.
  TokenProcessor(std::shared_ptr<const AccessTokens> tokens, Metrics& metrics);

  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context,
                       OutputMetadata* consumed, OutputMetadata* response) override;

 private:
  const std::shared_ptr<const AccessTokens> tokens_;
  TokenRefusals refusals_;
};

/// Returns the id of the token with which a call was accepted, or an empty string without tokens.
std::string TokenIdOf(const grpc::AuthContext* context);

}  // namespace logprobd
