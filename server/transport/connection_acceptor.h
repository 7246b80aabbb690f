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

namespace logprobd {

/// Listens on TCP and passes accepted connections to a handler.
///
/// gRPC 1.51 closes its listener permanently when a connection arrives while the process has no
/// file descriptor left. This class closes a connection that would use one of the last descriptors.
/// A connection that it cannot accept stays in the kernel's queue until descriptors are free again.
class ConnectionAcceptor {
 public:
  /// Receives a connected, non-blocking socket and owns it. It is called on the acceptor's thread.
  using Handler = absl::AnyInvocable<void(int socket)>;

  struct Options {
    std::string flag = "--listen";  ///< Name of the flag in error messages.
    ListenAddress address;          ///< Port 0 selects a free port.
    /// Number of file descriptors that connections may not use, because the process needs them.
    int files_reserved = 64;
  };

  /// Listens on every address to which the host name resolves, without accepting connections yet.
  /// Returns UNAVAILABLE with the reason if the address cannot be used, and RESOURCE_EXHAUSTED if
  /// no file descriptor is left.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const Options& options);

  /// Calls Stop.
  ~ConnectionAcceptor();

  int port() const { return port_; }

  /// Starts to accept connections. Must be called once.
  absl::Status Start(Handler handler);

  /// Stops listening. Connections that the handler received stay open. Idempotent, but not
  /// thread-safe.
  void Stop();

 private:
  ConnectionAcceptor(Options options, ListeningSockets listeners, FileDescriptor wake)
      : options_(std::move(options)),
        port_(listeners.port),
        listeners_(std::move(listeners.sockets)),
        wake_(std::move(wake)) {}

  void Run();
  /// Accepts some of the waiting connections. Returns false when no file descriptor is left for the
  /// next one.
  bool Accept(int listener);

  const Options options_;
  const int port_;
  std::vector<FileDescriptor> listeners_;
  const FileDescriptor wake_;  ///< An eventfd that becomes readable when the thread must stop.
  Handler handler_;
  std::thread thread_;
};

}  // namespace logprobd
