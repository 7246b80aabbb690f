#include "server/transport/listen_check.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

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

/// The error of a bind like gRPC's, 0: it works now.
int TryBind(const ListenAddress& address, std::string& resolve_error) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error =
          getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
      error != 0) {
    resolve_error = gai_strerror(error);
    return 0;
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  const Socket probe(found->ai_family, SOCK_STREAM);
  const int on = 1;
  setsockopt(probe.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  return bind(probe.fd(), found->ai_addr, found->ai_addrlen) == 0 ? 0 : errno;
}

}  // namespace

absl::Status CheckSocketPath(absl::string_view flag, const std::string& path) {
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
  const Socket probe(AF_UNIX, SOCK_STREAM);
  if (connect(probe.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return absl::UnavailableError(absl::StrCat(flag, ": another server is listening on ", path));
  }
  return absl::OkStatus();
}

absl::Status WhyNotListening(absl::string_view flag, const ListenAddress& address) {
  std::string reason;
  const int error = TryBind(address, reason);
  if (error == EADDRINUSE) {
    reason = "the port is in use; stop the other server or choose another port";
  } else if (error != 0) {
    reason = std::strerror(error);
  } else if (reason.empty()) {
    reason = "gRPC could not bind it";
  }
  return absl::UnavailableError(
      absl::StrCat(flag, ": cannot listen on ", address.ToString(), ": ", reason));
}

}  // namespace logprobd
