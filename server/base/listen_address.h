#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/file_descriptor.h"

namespace logprobd {

/// A host and a port, or the path of a Unix socket, to listen on.
struct ListenAddress {
  std::string host;  ///< Host name or address without brackets.
  int port = 0;      ///< From 0 to 65535; 0 means any free port.
  bool is_loopback = false;
  bool is_https = false;  ///< Only ParseHttpAddress sets it.
  std::string unix_path;  ///< If it is not empty, the other members have no meaning.

  /// Returns "host:port", with an IPv6 host in brackets and "https://" before it if is_https is
  /// set, or "unix:PATH".
  std::string ToString() const;
};

/// Parses "host:port" or "[ipv6]:port". Host names other than "localhost" are not loopback. Returns
/// INVALID_ARGUMENT that names `flag` if `text` has another form.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view flag, absl::string_view text);

/// Like ParseListenAddress, but "unix:PATH" is also an address.
absl::StatusOr<ListenAddress> ParseListenAddressOrPath(absl::string_view flag,
                                                       absl::string_view text);

/// Like ParseListenAddress, but "https://host:port" is also an address.
absl::StatusOr<ListenAddress> ParseHttpAddress(absl::string_view flag, absl::string_view text);

/// What a listener offers and demands.
struct ListenerSecurity {
  bool has_tls = false;
  bool has_client_certificates = false;  ///< Clients need a certificate.
  bool has_tokens = false;               ///< Callers need a token.
  /// Callers can change weights, so that other users of the host must not use a port of loopback.
  bool changes_weights = false;
  /// The address of the listener says whether it has TLS, and clients cannot have certificates.
  bool is_http = false;
};

/// Checks that nobody can use `address` without encryption and authentication. A Unix socket and,
/// unless the listener changes weights, loopback need neither. Returns FAILED_PRECONDITION that
/// names `flag` for any other address if
///   - tokens would cross the network without TLS, or
///   - there is no TLS with client certificates or tokens, and `insecure` is false.
absl::Status CheckReachable(absl::string_view flag, const ListenAddress& address,
                            const ListenerSecurity& security, bool insecure);

/// Non-blocking TCP sockets that listen on one port, one for each address of a host name.
struct ListeningSockets {
  std::vector<FileDescriptor> sockets;  ///< At least one.
  int port = 0;
};

/// Listens on every address to which the host name resolves. Returns UNAVAILABLE that names `flag`
/// and the reason if that is not possible.
absl::StatusOr<ListeningSockets> ListenOn(absl::string_view flag, const ListenAddress& address);

}  // namespace logprobd
