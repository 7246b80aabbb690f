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

  /// "host:port", an IPv6 host in brackets.
  std::string ToString() const;
};

/// Reads "host:port" or "[ipv6]:port"; INVALID_ARGUMENT names `flag`. Names other than "localhost"
/// count as public.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view flag, absl::string_view text);

/// FAILED_PRECONDITION, naming `flag`, for an address that is not loopback unless `insecure`: none
/// of our listeners encrypts or authenticates.
absl::Status CheckPublic(absl::string_view flag, const ListenAddress& address, bool insecure);

}  // namespace logprobd
