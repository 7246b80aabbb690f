#pragma once

#include <memory>

#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace logprobd {

// What has to be written differently for gRPC 1.51 and for newer versions.

/// Makes gRPC's lines lines of this process's log, at the debug level. Must be called once only.
void LogGrpcAtDebugLevel();

/// Returns the options of a TLS server that presents the certificate of `provider`. If
/// `needs_client` is set, it checks certificates of clients against the CAs of `provider`.
grpc::experimental::TlsServerCredentialsOptions TlsOptionsOf(
    const std::shared_ptr<grpc::experimental::CertificateProviderInterface>& provider,
    bool needs_client);

}  // namespace logprobd
