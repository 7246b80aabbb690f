#include "server/transport/connection_acceptor.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/log.h"
#include "server/transport/audit.h"

namespace logprobd {
namespace {

/// Pause before the next attempt to accept when no file descriptor is left.
constexpr absl::Duration kOutOfFilesPause = absl::Milliseconds(50);

/// Maximum number of connections to accept before the other listeners and the stop request are
/// checked. Without a limit, clients that connect as fast as the loop accepts would delay both.
constexpr int kAcceptsMax = 64;

/// Parts of the files for connections that the peers of a Unix socket may hold together, and that a
/// peer of TCP may hold. The first leaves half of them to TCP beside a control socket.
constexpr int kUnixShare = 4;
constexpr int kAddressShare = 2;

/// Returns true if the client has closed or reset the connection before it sent a byte.
bool IsOver(int socket) {
  char byte = 0;
  const ssize_t received = recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return received == 0 || (received < 0 && errno == ECONNRESET);
}

}  // namespace

ConnectionAcceptor::ConnectionAcceptor(const Options& options, FileDescriptor wake)
    : options_(options),
      address_(options.address),
      refusals_(Clock::Steady()),
      wake_(std::move(wake)) {}

absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> ConnectionAcceptor::Listen(
    const Options& options) {
  FileDescriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.is_open()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options.flag, ": cannot create an eventfd: ", std::strerror(errno)));
  }
  std::unique_ptr<ConnectionAcceptor> acceptor(new ConnectionAcceptor(options, std::move(wake)));
  LOGPROBD_RETURN_IF_ERROR(acceptor->Open());
  return acceptor;
}

absl::Status ConnectionAcceptor::Open() {
  if (address_.unix_path.empty()) {
    LOGPROBD_ASSIGN_OR_RETURN(ListeningSockets listening, ListenOn(options_.flag, address_));
    address_.port = listening.port;
    tcp_listeners_ = std::move(listening.sockets);
    return absl::OkStatus();
  }
  if (!options_.has_path_lock) {
    LOGPROBD_ASSIGN_OR_RETURN(path_lock_, SocketPathLock::Take(options_.flag, address_.unix_path));
  }
  LOGPROBD_ASSIGN_OR_RETURN(unix_listener_,
                            UnixListener::Open(options_.flag, address_.unix_path, SOCK_STREAM));
  return absl::OkStatus();
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
  if (thread_.joinable()) thread_.join();
  tcp_listeners_.clear();
  unix_listener_ = nullptr;
  path_lock_ = nullptr;
}

void ConnectionAcceptor::Run() {
  std::vector<pollfd> polled;
  for (const FileDescriptor& listener : tcp_listeners_) {
    polled.push_back({.fd = listener.get(), .events = POLLIN, .revents = 0});
  }
  if (unix_listener_ != nullptr) {
    polled.push_back({.fd = unix_listener_->fd(), .events = POLLIN, .revents = 0});
  }
  polled.push_back({.fd = wake_.get(), .events = POLLIN, .revents = 0});
  bool is_out_of_files = false;
  while (true) {
    // While no file descriptor is left the listeners stay readable, so the thread polls only the
    // stop request, for a limited time.
    pollfd* const first = is_out_of_files ? &polled.back() : polled.data();
    const int count =
        poll(first, is_out_of_files ? 1 : polled.size(),
             is_out_of_files ? static_cast<int>(absl::ToInt64Milliseconds(kOutOfFilesPause)) : -1);
    if (count > 0 && polled.back().revents != 0) return;
    is_out_of_files = false;
    for (size_t i = 0; i + 1 < polled.size(); ++i) {
      is_out_of_files = !Accept(polled[i].fd) || is_out_of_files;
    }
  }
}

bool ConnectionAcceptor::Accept(int listener) {
  for (int i = 0; i < kAcceptsMax; ++i) {
    sockaddr_storage peer = {};
    socklen_t size = sizeof(peer);
    const int socket =
        accept4(listener, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) {
      // These errors mean that the client has already closed the connection.
      if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    if (const absl::string_view reason = ReasonToRefuse(socket, peer); !reason.empty()) {
      close(socket);
      LogDebug("a connection was closed", {{"flag", options_.flag}, {"reason", reason}});
      continue;
    }
    handler_(socket);
  }
  return true;
}

absl::string_view ConnectionAcceptor::ReasonToRefuse(int socket, const sockaddr_storage& peer) {
  // gRPC would spend many times as long on it, which others' calls notice when a client connects
  // and closes ten thousand times a second.
  if (IsOver(socket)) return "its client has closed it";
  const int usable = FilesForConnections(options_.files_reserved);
  if (socket >= usable) return "few file descriptors are left";
  const bool is_unix = unix_listener_ != nullptr;
  std::optional<SocketPeer> process;
  if (is_unix) {
    process = PeerOf(socket);
    if (!process.has_value() || !process->IsOwnOrRoot()) {
      AuditRefusedConnection(options_.flag, process, refusals_);
      return "its process belongs to another user";
    }
  } else {
    const int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  // All peers of a Unix socket are one, so that they leave files to the other listeners.
  const int share = usable / (is_unix ? kUnixShare : kAddressShare);
  if (!peers_.Add(socket, peer, std::clamp(share, 1, options_.peer_connections_max))) {
    return is_unix ? "the socket has too many connections" : "its address has too many connections";
  }
  if (is_unix && options_.is_audited) AuditConnection(options_.flag, *process);
  return "";
}

}  // namespace logprobd
