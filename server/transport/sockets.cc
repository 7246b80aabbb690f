#include "server/transport/sockets.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace logprobd {

absl::Status CheckSocketPath(absl::string_view flag, const std::string& path, int type) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": the path has ", path.size(),
                                                   " bytes, must have fewer than ",
                                                   sizeof(address.sun_path)));
  }
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0) {
    return absl::OkStatus();
  }
  if (!S_ISSOCK(file.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, ": ", path, " exists and is not a socket; remove it or choose another path"));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  // The probe is non-blocking, because the queue of a server that hangs may be full.
  const FileDescriptor probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
      errno == EPROTOTYPE || errno == EAGAIN) {  // of another type, or its queue is full
    return absl::UnavailableError(absl::StrCat(flag, ": another server is listening on ", path));
  }
  if (errno == ECONNREFUSED || errno == ENOENT) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat(flag, ": cannot find out whether a server listens on ",
                                             path, ": ", std::strerror(errno)));
}

}  // namespace logprobd
