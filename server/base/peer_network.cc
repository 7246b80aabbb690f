#include "server/base/peer_network.h"

#include <netinet/in.h>

#include <cstddef>

namespace logprobd {

std::string PeerNetworkOf(const sockaddr_storage& peer) {
  if (peer.ss_family == AF_INET6) {
    constexpr size_t kNetworkBytes = 8;
    const in6_addr& six = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
    return {reinterpret_cast<const char*>(&six), kNetworkBytes};
  }
  if (peer.ss_family == AF_INET) {
    const in_addr& four = reinterpret_cast<const sockaddr_in&>(peer).sin_addr;
    return {reinterpret_cast<const char*>(&four), sizeof(four)};
  }
  return "";
}

}  // namespace logprobd
