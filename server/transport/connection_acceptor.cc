#include "server/transport/connection_acceptor.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/log.h"

namespace logprobd {
namespace {

/// How long it leaves waiting connections alone when there is no file for them.
constexpr absl::Duration kNoFilePause = absl::Milliseconds(50);

/// Connections that are taken before the other listeners and the wish to stop are looked at:
/// clients could connect as fast as it takes them.
constexpr int kAcceptsMax = 64;

absl::Status CannotListen(const ConnectionAcceptor::Options& options, absl::string_view reason) {
  return absl::UnavailableError(
      absl::StrCat(options.flag, ": cannot listen on ", options.address.ToString(), ": ", reason));
}

int PortOf(int listener) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

void SetPort(sockaddr* address, int port) {
  auto& field = address->sa_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                                               : reinterpret_cast<sockaddr_in*>(address)->sin_port;
  field = htons(static_cast<uint16_t>(port));
}

void SetOn(int socket, int level, int option) {
  const int on = 1;
  setsockopt(socket, level, option, &on, sizeof(on));
}

int OpenFilesMax() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur > INT32_MAX ? INT32_MAX : static_cast<int>(limit.rlim_cur);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> ConnectionAcceptor::Listen(
    const Options& options) {
  int port = options.address.port;
  LOGPROBD_ASSIGN_OR_RETURN(std::vector<FileDescriptor> listeners, Bind(options, port));
  FileDescriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.is_open()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options.flag, ": no file to listen with: ", std::strerror(errno)));
  }
  return std::unique_ptr<ConnectionAcceptor>(
      new ConnectionAcceptor(options, port, std::move(listeners), std::move(wake)));
}

absl::StatusOr<std::vector<FileDescriptor>> ConnectionAcceptor::Bind(const Options& options,
                                                                     int& port) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(options.address.host.c_str(), nullptr, &hints, &found);
      error != 0) {
    return CannotListen(options, gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  std::vector<FileDescriptor> listeners;
  std::string reason = "the name has no address";
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    FileDescriptor listener(
        socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
    if (!listener.is_open()) {
      reason = std::strerror(errno);  // a host without IPv6, say
      continue;
    }
    SetOn(listener.get(), SOL_SOCKET, SO_REUSEADDR);
    if (info->ai_family == AF_INET6) {
      SetOn(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY);
    }
    SetPort(info->ai_addr, port);
    if (bind(listener.get(), info->ai_addr, info->ai_addrlen) != 0 ||
        listen(listener.get(), SOMAXCONN) != 0) {
      if (errno == EADDRINUSE) {
        return CannotListen(options,
                            "the port is in use; stop the other server or choose another port");
      }
      reason = std::strerror(errno);
      continue;
    }
    port = PortOf(listener.get());  // the same one for the other addresses
    listeners.push_back(std::move(listener));
  }
  if (listeners.empty()) {
    return CannotListen(options, reason);
  }
  return listeners;
}

ConnectionAcceptor::~ConnectionAcceptor() { Stop(); }

absl::Status ConnectionAcceptor::Start(Handler handler) {
  handler_ = std::move(handler);
  LOGPROBD_ASSIGN_OR_RETURN(thread_, StartThread("accept", [this] { Run(); }));
  return absl::OkStatus();
}

void ConnectionAcceptor::Stop() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
  if (thread_.joinable()) {
    thread_.join();
  }
  listeners_.clear();
}

void ConnectionAcceptor::Run() {
  std::vector<pollfd> polled;
  for (const FileDescriptor& listener : listeners_) {
    polled.push_back({.fd = listener.get(), .events = POLLIN, .revents = 0});
  }
  polled.push_back({.fd = wake_.get(), .events = POLLIN, .revents = 0});
  bool is_short_of_files = false;
  while (true) {
    // Without a file the listeners stay readable: only the wish to stop is waited for, for a while.
    pollfd* const first = is_short_of_files ? &polled.back() : polled.data();
    const int count =
        poll(first, is_short_of_files ? 1 : polled.size(),
             is_short_of_files ? static_cast<int>(absl::ToInt64Milliseconds(kNoFilePause)) : -1);
    if (count > 0 && polled.back().revents != 0) {
      return;
    }
    is_short_of_files = false;
    for (size_t i = 0; i + 1 < polled.size(); ++i) {
      is_short_of_files = !Accept(polled[i].fd) || is_short_of_files;
    }
  }
}

bool ConnectionAcceptor::Accept(int listener) {
  for (int i = 0; i < kAcceptsMax; ++i) {
    const int socket = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) {
      // Of the others, most are a connection's that has gone already.
      if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    // The kernel gives the lowest number that is free, so a high one says that few are left.
    if (socket >= OpenFilesMax() - options_.files_reserved) {
      close(socket);
      LogDebug("a connection was closed: few files are left", {{"flag", options_.flag}});
      continue;
    }
    SetOn(socket, IPPROTO_TCP, TCP_NODELAY);
    handler_(socket);
  }
  return true;
}

}  // namespace logprobd
