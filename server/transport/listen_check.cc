#include "server/transport/listen_check.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

/// Closes on the way out.
class Socket {
 public:
  Socket(int domain, int type) : fd_(socket(domain, type | SOCK_CLOEXEC, 0)) {}
  ~Socket() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

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
  const Socket probe(AF_UNIX, type);
  // EPROTOTYPE: a server of another type.
  if (connect(probe.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
      errno == EPROTOTYPE) {
    return absl::UnavailableError(absl::StrCat(flag, ": another server is listening on ", path));
  }
  return absl::OkStatus();
}

}  // namespace logprobd
