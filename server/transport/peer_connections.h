#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace logprobd {

/// Counts the open connections of each peer by PeerNetworkOf, so that one peer cannot use up the
/// files of all. It does not need to be told when a connection is closed. Not thread-safe.
class PeerConnections {
 public:
  /// Adds a connected TCP socket, unless its peer already has `count_max` open connections. Returns
  /// whether it was added. `socket` is a new descriptor of the process, so whatever was added under
  /// its number before is closed.
  bool Add(int socket, const sockaddr_storage& peer, int count_max);

 private:
  struct Connection {
    std::string network;
    uint64_t cookie = 0;  ///< The kernel's number of the socket; 0 if there is none.
  };

  /// Returns the number that no other socket of this boot has, or 0 if `fd` is not a socket.
  static uint64_t CookieOf(int fd);
  void Forget(Connection& connection);
  void ForgetClosed(const std::string& network);

  std::vector<Connection>
      by_fd_;  ///< Also has closed connections; its size is at most that of fds.
  absl::flat_hash_map<std::string, int> counts_;  ///< Number of elements of by_fd_ of each peer.
};

}  // namespace logprobd
