#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/file_descriptor.h"
#include "server/base/listen_address.h"
#include "server/base/log.h"
#include "server/transport/peer_connections.h"
#include "server/transport/sockets.h"

namespace logprobd {

/// Listens on TCP or on a Unix socket and passes accepted connections to a handler.
///
/// gRPC 1.51 closes its listener permanently when a connection arrives while the process has no
/// file descriptor left. This class closes a connection that would use one of the last descriptors,
/// and one of a peer that already has its part of them or has closed it unused. A connection that
/// it cannot accept stays in the kernel's queue until descriptors are free again. On a Unix socket
/// it closes connections of other users than the server's own and root, of which it writes audit
/// lines for at most 20 in 10 s.
class ConnectionAcceptor {
 public:
  /// Receives a connected, non-blocking socket and owns it. It is called on the acceptor's thread.
  using Handler = absl::AnyInvocable<void(int socket)>;

  struct Options {
    std::string flag = "--listen";  ///< Name of the flag in error messages.
    ListenAddress address;          ///< Port 0 selects a free port.
    /// Number of file descriptors that connections may not use, because the process needs them.
    int files_reserved = 64;
    /// Maximum number of connections of one peer address (IPv6: of one /64 network), or of a Unix
    /// socket. If few files may be open, it is half of those that connections may use, and for a
    /// Unix socket a quarter.
    int peer_connections_max = 1'024;
    /// For a Unix socket: the caller has the SocketPathLock, and each accepted connection gets an
    /// audit line.
    bool has_path_lock = false;
    bool is_audited = true;
  };

  /// Listens on every address to which the host name resolves, without accepting connections yet.
  /// Returns UNAVAILABLE with the reason if the address cannot be used, and RESOURCE_EXHAUSTED if
  /// no file descriptor is left.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const Options& options);

  /// Calls Stop.
  ~ConnectionAcceptor();

  int port() const { return address_.port; }
  /// Returns the address with the port that the acceptor has bound.
  const ListenAddress& address() const { return address_; }

  /// Starts to accept connections. Must be called once.
  absl::Status Start(Handler handler);

  /// Stops listening. Connections that the handler received stay open. Idempotent, but not
  /// thread-safe.
  void Stop();

 private:
  ConnectionAcceptor(const Options& options, FileDescriptor wake);

  absl::Status Open();

  void Run();
  /// Accepts some of the waiting connections. Returns false when no file descriptor is left for the
  /// next one.
  bool Accept(int listener);
  /// Returns why a connection is refused, or an empty string.
  absl::string_view ReasonToRefuse(int socket, const sockaddr_storage& peer);

  const Options options_;
  ListenAddress address_;
  std::unique_ptr<SocketPathLock> path_lock_;    ///< Null for TCP, or if the caller has it.
  std::unique_ptr<UnixListener> unix_listener_;  ///< Null for TCP.
  std::vector<FileDescriptor> tcp_listeners_;
  PeerConnections peers_;      ///< Used by the acceptor's thread.
  LogLimiter refusals_;        ///< Limits the lines about other users at the Unix socket.
  const FileDescriptor wake_;  ///< An eventfd that becomes readable when the thread must stop.
  Handler handler_;
  std::thread thread_;
};

}  // namespace logprobd
