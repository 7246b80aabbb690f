#pragma once

#include <sys/socket.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// INVALID_ARGUMENT when `path` cannot be a Unix socket; UNAVAILABLE when a server listens there or
/// when that cannot be told. A socket that nobody serves is left over and may be replaced. `type`
/// is that of the server. Does not block.
absl::Status CheckSocketPath(absl::string_view flag, const std::string& path,
                             int type = SOCK_STREAM);

}  // namespace logprobd
