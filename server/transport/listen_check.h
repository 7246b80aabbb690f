#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/listen_address.h"

namespace logprobd {

/// INVALID_ARGUMENT when `path` cannot be a Unix socket; UNAVAILABLE when a server answers there.
/// A socket that nobody serves is left over and may be replaced.
absl::Status CheckSocketPath(absl::string_view flag, const std::string& path);

/// UNAVAILABLE saying why nothing can listen on `address`. gRPC only says that it could not.
absl::Status WhyNotListening(absl::string_view flag, const ListenAddress& address);

}  // namespace logprobd
