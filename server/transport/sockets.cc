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
    return absl::InvalidArgumentError(absl::StrCat(
        flag, ": a path of ", path.size(), " bytes, must be less than ", sizeof(address.sun_path)));
  }
  struct stat facts = {};
  if (lstat(path.c_str(), &facts) != 0) {
    return absl::OkStatus();
  }
  if (!S_ISSOCK(facts.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": ", path, " exists and is no socket; it is left alone"));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  // One that does not wait: the queue of a server that hangs may be full.
  const FileDescriptor probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
      errno == EPROTOTYPE || errno == EAGAIN) {  // a server of another type; a full queue
    return absl::UnavailableError(absl::StrCat(flag, ": another server is listening on ", path));
  }
  if (errno == ECONNREFUSED || errno == ENOENT) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat(flag, ": who is listening on ", path,
                                             " cannot be told: ", std::strerror(errno)));
}

}  // namespace logprobd
