#include "server/transport/peer_connections.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "server/base/peer_network.h"

namespace logprobd {

bool PeerConnections::Add(int socket, const sockaddr_storage& peer, int count_max) {
  const auto index = static_cast<size_t>(socket);
  if (index >= by_fd_.size()) by_fd_.resize(index + 1);
  Forget(by_fd_[index]);
  const std::string network = PeerNetworkOf(peer);
  const auto has_too_many = [&] {
    const auto found = counts_.find(network);
    return found != counts_.end() && found->second >= count_max;
  };
  if (has_too_many()) {
    ForgetClosed(network);
    if (has_too_many()) return false;
  }
  by_fd_[index] = {.network = network, .cookie = CookieOf(socket)};
  ++counts_[network];
  return true;
}

uint64_t PeerConnections::CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

void PeerConnections::Forget(Connection& connection) {
  if (connection.cookie == 0) return;
  const auto found = counts_.find(connection.network);
  if (--found->second == 0) counts_.erase(found);
  connection = {};
}

void PeerConnections::ForgetClosed(const std::string& network) {
  for (size_t i = 0; i < by_fd_.size(); ++i) {
    if (by_fd_[i].cookie != 0 && by_fd_[i].network == network &&
        CookieOf(static_cast<int>(i)) != by_fd_[i].cookie) {
      Forget(by_fd_[i]);
    }
  }
}

}  // namespace logprobd
