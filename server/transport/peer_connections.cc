#include "server/transport/peer_connections.h"

#include "server/base/peer_network.h"

namespace logprobd {

bool PeerConnections::Add(int socket, const sockaddr_storage& address, int count_max) {
  const auto fd = static_cast<size_t>(socket);
  if (fd >= by_fd_.size()) by_fd_.resize(fd + 1);
  if (Peer* const last = by_fd_[fd].peer; last != nullptr) {
    Forget(fd);
    if (last->sockets.empty()) peers_.erase(peers_.find(last->network));
  }
  const std::string network = PeerNetworkOf(address);
  const auto found = peers_.find(network);
  if (found != peers_.end() && HasTooMany(found->second, count_max)) return false;
  Peer& peer = peers_[network];
  peer.network = network;
  by_fd_[fd] = {.cookie = CookieOf(socket), .peer = &peer, .index = peer.sockets.size()};
  peer.sockets.push_back(fd);
  return true;
}

bool PeerConnections::HasTooMany(Peer& peer, int count_max) {
  const auto most = static_cast<size_t>(count_max);
  if (peer.sockets.size() < most) return false;
  const absl::Time now = clock_.Now();
  if (now < peer.next_look) return true;
  peer.next_look = now + kLookInterval;
  for (size_t i = peer.sockets.size(); i-- > 0;) {  // Forget moves the last one, which was seen
    const size_t fd = peer.sockets[i];
    const uint64_t cookie = CookieOf(static_cast<int>(fd));
    if (cookie == 0 || cookie != by_fd_[fd].cookie) Forget(fd);
  }
  return peer.sockets.size() >= most;
}

uint64_t PeerConnections::CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

void PeerConnections::Forget(size_t fd) {
  const Connection gone = by_fd_[fd];
  std::vector<size_t>& sockets = gone.peer->sockets;
  by_fd_[sockets.back()].index = gone.index;
  sockets[gone.index] = sockets.back();
  sockets.pop_back();
  by_fd_[fd] = {};
}

}  // namespace logprobd
