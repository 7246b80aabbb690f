#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/file_descriptor.h"

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

/// Returns FAILED_PRECONDITION that names `flag` if `address` is not loopback and `insecure` is
/// false, because no listener encrypts or authenticates.
absl::Status CheckLoopback(absl::string_view flag, const ListenAddress& address, bool insecure);

/// Non-blocking TCP sockets that listen on one port, one for each address of a host name.
struct ListeningSockets {
  std::vector<FileDescriptor> sockets;  ///< At least one.
  int port = 0;
};

/// Listens on every address to which the host name resolves. Returns UNAVAILABLE that names `flag`
/// and the reason if that is not possible.
absl::StatusOr<ListeningSockets> ListenOn(absl::string_view flag, const ListenAddress& address);

}  // namespace logprobd
