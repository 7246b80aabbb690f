#include "server/base/peer_network.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <string>

#include "gtest/gtest.h"

namespace logprobd::testing {
namespace {

std::string NetworkOf(const char* text) {
  sockaddr_storage address = {};
  auto& four = reinterpret_cast<sockaddr_in&>(address);
  auto& six = reinterpret_cast<sockaddr_in6&>(address);
  if (inet_pton(AF_INET, text, &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
  } else {
    EXPECT_EQ(inet_pton(AF_INET6, text, &six.sin6_addr), 1);
    six.sin6_family = AF_INET6;
  }
  return PeerNetworkOf(address);
}

TEST(PeerNetworkOfTest, EachIpv4AddressIsANetwork) {
  EXPECT_EQ(NetworkOf("192.0.2.1"), NetworkOf("192.0.2.1"));
  EXPECT_NE(NetworkOf("192.0.2.1"), NetworkOf("192.0.2.2"));
}

TEST(PeerNetworkOfTest, TheFirst64BitsOfAnIpv6AddressAreItsNetwork) {
  EXPECT_EQ(NetworkOf("2001:db8:1:2::1"), NetworkOf("2001:db8:1:2:ffff::2"));
  EXPECT_NE(NetworkOf("2001:db8:1:2::1"), NetworkOf("2001:db8:1:3::1"));
  EXPECT_NE(NetworkOf("c000:201::"), NetworkOf("192.0.2.1"));  // they begin with the same bytes
}

TEST(PeerNetworkOfTest, OtherAddressesHaveNone) {
  sockaddr_storage address = {};
  address.ss_family = AF_UNIX;
  EXPECT_EQ(PeerNetworkOf(address), "");
}

}  // namespace
}  // namespace logprobd::testing
