#pragma once

#include <map>
#include <memory>

#include "grpcpp/security/auth_context.h"
#include "grpcpp/security/auth_metadata_processor.h"
#include "grpcpp/support/string_ref.h"
#include "server/metrics/metrics.h"
#include "server/transport/access_list.h"

namespace logprobd {

/// Refuses calls whose caller has no entry with the scope of their method. gRPC calls it when the
/// metadata of a call has arrived and before it reads a message, so that a refused call buffers
/// nothing. The methods of HealthService need no entry, and no others must be exempt: gRPC buffers
/// up to the message limit of each call that passes.
///
/// gRPC does not tell it the address of the peer, so the lines about refusals do not have it.
///
/// It leaves no mark on the call: gRPC's AuthContext belongs to the connection, whose calls may be
/// those of several callers. Later stages identify the caller again.
class AccessProcessor final : public grpc::AuthMetadataProcessor {
 public:
  /// `metrics` must outlive the processor.
  AccessProcessor(std::shared_ptr<const AccessList> access, Metrics& metrics);

  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context,
                       OutputMetadata* consumed, OutputMetadata* response) override;

 private:
  const std::shared_ptr<const AccessList> access_;
  AccessRefusals refusals_;
};

/// Returns what a call with this metadata, on a connection with this context, shows of its caller.
/// The names of a certificate are the DNS names and then the URIs among its subject alternative
/// names, or its common name if it has no alternative name of any kind (RFC 6125): CAs check
/// alternative names, while many copy the common name from the request. The result refers to the
/// arguments; `context` may be null.
Credentials CredentialsOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                          const grpc::AuthContext* context);

}  // namespace logprobd
