#pragma once

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace logprobd {

// What has to be written differently for gRPC 1.51 and for newer versions.

/// Returns the version of gRPC with which the process runs, such as "1.51.1".
std::string GrpcVersion();

/// Returns what peers can do to a server with this version of gRPC although no limit of the server
/// allows it, or an empty string if that is nothing known. It concerns everybody who can send
/// HTTP/2, because gRPC reads headers before it checks tokens.
std::string GrpcVulnerabilities(absl::string_view version);

/// Makes the lines of gRPC and Protobuf lines of this process's log, at the debug level. Must be
/// called once only.
void LogGrpcAtDebugLevel();

/// Returns the options of a TLS server that presents the certificate of `provider`. If
/// `needs_client` is set, it checks certificates of clients against the CAs of `provider`.
grpc::experimental::TlsServerCredentialsOptions TlsOptionsOf(
    const std::shared_ptr<grpc::experimental::CertificateProviderInterface>& provider,
    bool needs_client);

}  // namespace logprobd
