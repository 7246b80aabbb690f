#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// A host and a port to listen on.
struct ListenAddress {
  std::string host;  ///< Without brackets.
  int port = 0;      ///< From 0 to 65535; 0 takes a free port.
  bool is_loopback = false;

  /// Returns "host:port", with an IPv6 host in brackets.
  std::string ToString() const;
};

/// Parses "host:port" or "[ipv6]:port". Host names other than "localhost" count as public.
/// INVALID_ARGUMENT names `flag`.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view flag, absl::string_view text);

/// Refuses an address that is not loopback unless `insecure`, because no listener encrypts or
/// authenticates. FAILED_PRECONDITION names `flag`.
absl::Status CheckPublic(absl::string_view flag, const ListenAddress& address, bool insecure);

}  // namespace logprobd
