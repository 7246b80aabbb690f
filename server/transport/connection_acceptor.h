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
#include "server/base/listen_address.h"
#include "server/transport/sockets.h"

namespace logprobd {

/// Listens on TCP and passes accepted connections to a handler.
///
/// gRPC 1.51 closes its listener for good when a connection arrives while the process has no file
/// descriptor left. This class closes a connection that would use one of the last descriptors. A
/// connection that it cannot accept stays with the kernel until descriptors are free again.
class ConnectionAcceptor {
 public:
  /// Receives a connected, non-blocking socket and owns it. Called on the acceptor's thread.
  using Handler = absl::AnyInvocable<void(int socket)>;

  struct Options {
    std::string flag = "--listen";  ///< Name of the flag in error messages.
    ListenAddress address;          ///< Port 0 takes a free port.
    /// Number of file descriptors that connections may not use, because the process needs them.
    int files_reserved = 64;
  };

  /// Listens on every address to which the host name resolves, without accepting connections yet.
  /// UNAVAILABLE says why the address cannot be used; RESOURCE_EXHAUSTED means that no file
  /// descriptor is left.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const Options& options);

  /// Calls Stop.
  ~ConnectionAcceptor();

  int port() const { return port_; }

  /// Starts to accept connections. Call it once.
  absl::Status Start(Handler handler);

  /// Stops listening. Connections that the handler received stay open. Idempotent; call it from one
  /// thread.
  void Stop();

 private:
  ConnectionAcceptor(Options options, int port, std::vector<FileDescriptor> listeners,
                     FileDescriptor wake)
      : options_(std::move(options)),
        port_(port),
        listeners_(std::move(listeners)),
        wake_(std::move(wake)) {}

  static absl::StatusOr<std::vector<FileDescriptor>> Bind(const Options& options, int& port);
  void Run();
  /// Accepts some of the waiting connections. Returns false when no file descriptor is left for the
  /// next.
  bool Accept(int listener);

  const Options options_;
  const int port_;
  std::vector<FileDescriptor> listeners_;
  const FileDescriptor wake_;  ///< An eventfd that becomes readable when the thread must stop.
  Handler handler_;
  std::thread thread_;
};

}  // namespace logprobd
