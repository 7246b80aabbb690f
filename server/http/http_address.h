#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

struct HttpAddress {
  std::string host;
  int port = 0;
  bool is_loopback = false;  ///< Names other than localhost count as public.
};

/// Splits "host:port" or "[ipv6]:port"; the port is 0 to 65535. INVALID_ARGUMENT names the address.
absl::StatusOr<HttpAddress> ParseHttpAddress(absl::string_view address);

}  // namespace logprobd
