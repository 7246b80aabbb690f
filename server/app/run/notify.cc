#include "server/app/run/notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/transport/sockets.h"

namespace logprobd {

absl::Status NotifyServiceManager(absl::string_view message) {
  const char* const variable = std::getenv("NOTIFY_SOCKET");
  const absl::string_view path = variable == nullptr ? "" : variable;
  if (path.empty()) return absl::OkStatus();
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if ((path[0] != '/' && path[0] != '@') || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("NOTIFY_SOCKET is neither an absolute path nor an abstract name: ", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  if (path[0] == '@') {
    address.sun_path[0] = '\0';  // An abstract name, whose length is not given by a final zero.
  }
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  const FileDescriptor fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (sendto(fd.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
             reinterpret_cast<const sockaddr*>(&address), length) < 0) {
    return absl::UnavailableError(absl::StrCat("NOTIFY_SOCKET ", path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

absl::Duration ServiceWatchdogTime() {
  const char* const time = std::getenv("WATCHDOG_USEC");
  const char* const pid = std::getenv("WATCHDOG_PID");
  int64_t microseconds = 0;
  int64_t expected_pid = getpid();
  if (time == nullptr || !absl::SimpleAtoi(time, &microseconds) || microseconds <= 0 ||
      (pid != nullptr && !absl::SimpleAtoi(pid, &expected_pid)) || expected_pid != getpid()) {
    return absl::InfiniteDuration();
  }
  return absl::Microseconds(microseconds);
}

}  // namespace logprobd
