#pragma once

#include <sys/socket.h>

#include <string>

namespace logprobd {

/// Returns the bytes of a peer's IP address that a single host cannot choose: an IPv4 address, or
/// the /64 network of an IPv6 address, which a host usually has to itself. Limits count by these.
/// Returns an empty string for other kinds of addresses.
std::string PeerNetworkOf(const sockaddr_storage& peer);

}  // namespace logprobd
