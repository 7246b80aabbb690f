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

/// Listens on TCP and hands over connections.
///
/// gRPC 1.51 gives up a listener for good when a connection arrives while the process has no file
/// left. This one closes connections that would take one of the last files, and those that it
/// cannot take it leaves to the kernel until files are free again.
class ConnectionAcceptor {
 public:
  /// Takes a connected socket, non-blocking, and owns it from then on. On the acceptor's thread.
  using Handler = absl::AnyInvocable<void(int socket)>;

  struct Options {
    std::string flag = "--listen";  ///< Named in errors.
    ListenAddress address;          ///< Port 0 takes a free one.
    /// Files that are kept from connections: the process's own work needs some.
    int files_reserved = 64;
  };

  /// Listens, without taking connections yet, on every address that the host resolves to.
  /// UNAVAILABLE says why it cannot; RESOURCE_EXHAUSTED when there is no file left.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const Options& options);

  /// As Stop.
  ~ConnectionAcceptor();

  int port() const { return port_; }

  /// Takes connections from now on. Once.
  absl::Status Start(Handler handler);

  /// Refuses connections from now on. Those handed over live on. Idempotent; from one thread.
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
  /// Takes some of the connections that wait. False: there is no file for the next.
  bool Accept(int listener);

  const Options options_;
  const int port_;
  std::vector<FileDescriptor> listeners_;
  const FileDescriptor wake_;  ///< An eventfd: readable once it is to stop.
  Handler handler_;
  std::thread thread_;
};

}  // namespace logprobd
