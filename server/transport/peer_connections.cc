#include "server/transport/peer_connections.h"

#include <netinet/in.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace logprobd {

bool PeerConnections::Add(int socket, const sockaddr_storage& peer, int count_max) {
  const auto index = static_cast<size_t>(socket);
  if (index >= by_fd_.size()) {
    by_fd_.resize(index + 1);
  }
  Forget(by_fd_[index]);
  const Address address = AddressOf(peer);
  const auto has_too_many = [&] {
    const auto found = counts_.find(address);
    return found != counts_.end() && found->second >= count_max;
  };
  if (has_too_many()) {
    ForgetClosed(address);
    if (has_too_many()) {
      return false;
    }
  }
  by_fd_[index] = {.peer = address, .cookie = CookieOf(socket)};
  ++counts_[address];
  return true;
}

PeerConnections::Address PeerConnections::AddressOf(const sockaddr_storage& peer) {
  Address address = {};
  if (peer.ss_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(peer);
    constexpr size_t kNetworkBytes = 8;
    std::memcpy(address.data(), &six.sin6_addr, kNetworkBytes);
  } else if (peer.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(peer);
    std::memcpy(address.data() + address.size() - sizeof(four.sin_addr), &four.sin_addr,
                sizeof(four.sin_addr));
  }
  return address;
}

uint64_t PeerConnections::CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

void PeerConnections::Forget(Connection& connection) {
  if (connection.cookie == 0) {
    return;
  }
  const auto found = counts_.find(connection.peer);
  if (--found->second == 0) {
    counts_.erase(found);
  }
  connection = {};
}

void PeerConnections::ForgetClosed(const Address& peer) {
  for (size_t i = 0; i < by_fd_.size(); ++i) {
    if (by_fd_[i].cookie != 0 && by_fd_[i].peer == peer &&
        CookieOf(static_cast<int>(i)) != by_fd_[i].cookie) {
      Forget(by_fd_[i]);
    }
  }
}

}  // namespace logprobd
