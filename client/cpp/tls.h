#pragma once

#include <string>

namespace logprobd::client {

/// TLS for the TCP connections of a client; a Unix socket stays plaintext. Each member but
/// `server_name` is the path of a PEM file, which is read when the client is created.
struct Tls {
  /// Certificates that are trusted to have issued the server's certificate. If empty, gRPC's
  /// default: $GRPC_DEFAULT_SSL_ROOTS_FILE_PATH, or the roots of the system.
  std::string ca = {};
  /// This client's certificate and its chain, for servers that demand one. Needs `key`.
  std::string cert = {};
  std::string key = {};  ///< Private key of `cert`, without a passphrase.
  /// Name that the server's certificate must contain. If empty, the host of the address.
  std::string server_name = {};
};

}  // namespace logprobd::client
