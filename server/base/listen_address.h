#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// A host and a port to listen on.
struct ListenAddress {
  std::string host;  ///< Host name or address without brackets.
  int port = 0;      ///< From 0 to 65535; 0 means any free port.
  bool is_loopback = false;

  /// Returns "host:port", with an IPv6 host in brackets.
  std::string ToString() const;
};

/// Parses "host:port" or "[ipv6]:port". Host names other than "localhost" are not loopback. Returns
/// INVALID_ARGUMENT that names `flag` if `text` has another form.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view flag, absl::string_view text);

/// Whether a listener demands certificates of its clients.
enum class ClientCertificates { kUnsupported, kOff, kRequired };

/// Returns FAILED_PRECONDITION that names `flag` if other hosts can use `address` without
/// authentication: it is not loopback, clients need no certificate, and `insecure` is false.
absl::Status CheckLoopback(absl::string_view flag, const ListenAddress& address, bool insecure,
                           ClientCertificates certificates = ClientCertificates::kUnsupported);

}  // namespace logprobd
