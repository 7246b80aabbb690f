#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace logprobd {

/// Where `--local auto` puts its sockets: in the first of these folders that is ours alone:
/// $XDG_RUNTIME_DIR, /run/user/UID, /tmp/logprobd-UID (made if need be).
std::vector<std::string> LocalFolders();

/// A path for the Unix socket of a server whose data port is `port`, or with a name by chance for
/// port 0, in the first of `folders` that belongs to our user, that no other user may enter and
/// that can be written to. UNAVAILABLE says what is wrong with each.
absl::StatusOr<std::string> AutoLocalPath(int port, const std::vector<std::string>& folders);

}  // namespace logprobd
