#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// A host and port to listen on.
struct ListenAddress {
  std::string host;  ///< Without brackets.
  int port = 0;      ///< 0 to 65535; 0 takes a free one.
  bool is_loopback = false;

  /// As gRPC wants it, an IPv6 host in brackets.
  std::string ToString() const;
};

/// Reads "host:port" or "[ipv6]:port"; INVALID_ARGUMENT names `flag`. Names other than "localhost"
/// count as public.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view flag, absl::string_view text);

/// INVALID_ARGUMENT when `path` cannot be a Unix socket; UNAVAILABLE when a server answers there.
/// A socket that nobody serves is left over and may be replaced.
absl::Status CheckSocketPath(absl::string_view flag, const std::string& path);

/// UNAVAILABLE saying why nothing can listen on `address`. gRPC only says that it could not.
absl::Status WhyNotListening(absl::string_view flag, const ListenAddress& address);

}  // namespace logprobd
