#pragma once

#include <sys/socket.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/file_descriptor.h"

namespace logprobd {

/// Checks that a server may create a Unix socket of `type` at `path`, without blocking. Returns
/// INVALID_ARGUMENT if `path` cannot be a Unix socket, and UNAVAILABLE if a server listens there or
/// if the function cannot find out. Errors name `flag`. A leftover socket on which no server
/// listens may be replaced.
absl::Status CheckSocketPath(absl::string_view flag, const std::string& path,
                             int type = SOCK_STREAM);

}  // namespace logprobd
