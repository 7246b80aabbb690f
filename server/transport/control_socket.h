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

/// The control socket of clients on this host: a Unix socket of type SOCK_SEQPACKET with the
/// messages of local.proto. A connection is a lease; what it was given is taken back when it ends.
///
/// One thread waits for all connections, another makes regions. A peer that is slow, silent or
/// sends nonsense holds one of `connections_max` places and nothing else: answers that it does not
/// take are not kept, it is dropped.
class ControlSocket {
 public:
  struct Options {
    std::string path = {};
    /// What clients are told.
    bool cuda_ipc = false;
    int32_t connections_max = 256;
    /// Longest time from connecting to Hello.
    absl::Duration hello_time_max = absl::Seconds(10);
    /// Whose processes are let in. Null: those of this process's user, and root.
    std::function<bool(uid_t)> is_allowed = nullptr;
  };

  /// Longest packet that is read.
  static constexpr int64_t kPacketBytesMax = 4'096;

  /// Listens, with mode 0600. Errors as CheckSocketPath, UNAVAILABLE when it cannot listen and
  /// RESOURCE_EXHAUSTED when no thread can be had. `regions` must outlive the socket.
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
