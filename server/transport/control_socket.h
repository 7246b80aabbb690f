#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/transport/shared_regions.h"

namespace logprobd {

/// The control socket for clients on this host: a Unix socket of type SOCK_SEQPACKET with the
/// messages of local.proto. A connection is a lease. When it ends, the server closes its regions.
///
/// One thread waits for all connections, and another creates regions. A peer that is slow, sends
/// nothing or sends invalid data occupies one of `connections_max` connections and does not delay
/// others. If a peer does not read its replies, the server closes the connection instead of
/// queueing them.
class ControlSocket {
 public:
  struct Options {
    std::string path = {};
    /// Value of Welcome.cuda_ipc.
    bool cuda_ipc = false;
    /// If few files may be open, it is a quarter of those that connections may use.
    int32_t connections_max = 256;
    /// Number of file descriptors that connections may not use, because the process needs them.
    int files_reserved = 96;
    /// Maximum time from connecting to Hello.
    absl::Duration hello_time_max = absl::Seconds(10);
    /// Returns whether processes of a user may connect. Null allows this process's own user and
    /// root.
    std::function<bool(uid_t)> is_allowed = nullptr;
  };

  /// Maximum size of a packet in bytes that the server reads.
  static constexpr int64_t kPacketBytesMax = 4'096;

  /// Listens on a socket with mode 0600. Returns the errors of CheckSocketPath, UNAVAILABLE if the
  /// process cannot listen, and RESOURCE_EXHAUSTED if no file descriptor or thread is available.
  /// `regions` must outlive the socket.
  static absl::StatusOr<std::unique_ptr<ControlSocket>> Create(const Options& options,
                                                               SharedRegions& regions);
  /// Ends all leases and removes the socket.
  ~ControlSocket();

 private:
  struct Impl;
  explicit ControlSocket(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
