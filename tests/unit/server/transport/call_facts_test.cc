#include "server/transport/call_facts.h"

#include <string>

#include "gtest/gtest.h"

namespace logprobd {
namespace {

using internal::ClientId;

TEST(CallFactsTest, AClientWithoutAnIdIsItsAddressWithoutThePort) {
  EXPECT_EQ(ClientId("", "ipv4:10.0.0.7:50312"), "ipv4:10.0.0.7");
  EXPECT_EQ(ClientId("", "ipv6:%5B::1%5D:50312"), "ipv6:%5B::1%5D");
  EXPECT_EQ(ClientId("", "unix:"), "unix");
}

TEST(CallFactsTest, AClaimedIdIsCutAndCleaned) {
  EXPECT_EQ(ClientId("trainer-7/eval@host:1.2_x", "unix:"), "trainer-7/eval@host:1.2_x");
  EXPECT_EQ(ClientId("a b\n\x1B[31m\xC3\xA9", "unix:"), "a_b___31m__");
  EXPECT_EQ(ClientId(std::string(200, 'a'), "unix:"), std::string(64, 'a'));
}

}  // namespace
}  // namespace logprobd
