#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/node_hash_map.h"
#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logprobd {

/// Counts the open connections of each peer by PeerNetworkOf, so that one peer cannot use up the
/// files of all. It does not need to be told when a connection is closed. Not thread-safe.
class PeerConnections {
 public:
  /// Shortest time between two looks for the closed connections of a peer that has too many. A look
  /// takes as long as ten accepts, so without it such a peer would delay others by connecting.
  static constexpr absl::Duration kLookInterval = absl::Milliseconds(100);

  /// `clock` must outlive this object.
  explicit PeerConnections(const Clock& clock = Clock::Steady()) : clock_(clock) {}

  /// Adds a connected socket, unless its peer already has `count_max` open connections or had them
  /// within kLookInterval. Returns whether it was added. `socket` is a new descriptor of the
  /// process, so whatever was added under its number before is closed.
  bool Add(int socket, const sockaddr_storage& peer, int count_max);

 private:
  struct Peer {
    std::string network;
    std::vector<size_t> sockets;  ///< Also has closed ones.
    absl::Time next_look = absl::InfinitePast();
  };
  struct Connection {
    uint64_t cookie = 0;   ///< The kernel's number of the socket; 0 if it has none.
    Peer* peer = nullptr;  ///< Null if there is no connection.
    size_t index = 0;      ///< In Peer::sockets.
  };

  /// Returns the number that no other socket of this boot has, or 0 if `fd` is not a socket.
  static uint64_t CookieOf(int fd);
  bool HasTooMany(Peer& peer, int count_max);
  /// Removes a socket from its peer.
  void Forget(size_t fd);

  const Clock& clock_;
  std::vector<Connection> by_fd_;  ///< Also has closed ones; its size is at most that of fds.
  absl::node_hash_map<std::string, Peer> peers_;
};

}  // namespace logprobd
