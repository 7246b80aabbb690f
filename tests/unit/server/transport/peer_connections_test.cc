#include "server/transport/peer_connections.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/base/file_descriptor.h"
#include "tests/support/fake_clock.h"

namespace logprobd {
namespace {

using testing::FakeClock;

sockaddr_storage Four(const std::string& text) {
  sockaddr_storage peer = {};
  auto& four = reinterpret_cast<sockaddr_in&>(peer);
  four.sin_family = AF_INET;
  EXPECT_EQ(inet_pton(AF_INET, text.c_str(), &four.sin_addr), 1);
  return peer;
}

sockaddr_storage Six(const std::string& text) {
  sockaddr_storage peer = {};
  auto& six = reinterpret_cast<sockaddr_in6&>(peer);
  six.sin6_family = AF_INET6;
  EXPECT_EQ(inet_pton(AF_INET6, text.c_str(), &six.sin6_addr), 1);
  return peer;
}

/// Adds new sockets, which stay open until Close.
class PeerConnectionsTest : public ::testing::Test {
 protected:
  bool Add(const sockaddr_storage& peer, int count_max = 2) {
    FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!connections_.Add(socket.get(), peer, count_max)) {
      return false;
    }
    open_.push_back(std::move(socket));
    return true;
  }
  void Close(size_t index) { open_[index] = FileDescriptor(); }

  FakeClock clock_;
  PeerConnections connections_{clock_};
  std::vector<FileDescriptor> open_;
};

TEST_F(PeerConnectionsTest, RefusesAnAddressWithTooManyAndNoOther) {
  EXPECT_TRUE(Add(Four("10.0.0.1")));
  EXPECT_TRUE(Add(Four("10.0.0.1")));
  EXPECT_FALSE(Add(Four("10.0.0.1")));
  EXPECT_TRUE(Add(Four("10.0.0.2")));
}

TEST_F(PeerConnectionsTest, CountsANetworkOfIpv6AsOnePeer) {
  EXPECT_TRUE(Add(Six("2001:db8:0:1::1")));
  EXPECT_TRUE(Add(Six("2001:db8:0:1:ffff::2")));
  EXPECT_FALSE(Add(Six("2001:db8:0:1::3")));
  EXPECT_TRUE(Add(Six("2001:db8:0:2::1")));
}

TEST_F(PeerConnectionsTest, DoesNotCountClosedConnections) {
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(Add(Four("10.0.0.1"))) << round;
    ASSERT_TRUE(Add(Four("10.0.0.1"))) << round;
    EXPECT_FALSE(Add(Four("10.0.0.1"))) << round;
    open_.clear();
  }
}

TEST_F(PeerConnectionsTest, ADescriptorThatAnotherPeerUsesNowCountsForItOnly) {
  ASSERT_TRUE(Add(Four("10.0.0.1"), 1));
  open_.clear();
  ASSERT_TRUE(Add(Four("10.0.0.2"), 1));  // with the same number

  EXPECT_TRUE(Add(Four("10.0.0.1"), 1));
  EXPECT_FALSE(Add(Four("10.0.0.2"), 1));
}

TEST_F(PeerConnectionsTest, AClosedDescriptorThatIsNowAFileDoesNotCount) {
  ASSERT_TRUE(Add(Four("10.0.0.1"), 1));
  open_.clear();
  const FileDescriptor file(dup(0));  // takes the free number

  EXPECT_TRUE(Add(Four("10.0.0.1"), 1));
}

TEST_F(PeerConnectionsTest, AClosedDescriptorThatIsNowAnotherSocketDoesNotCount) {
  ASSERT_TRUE(Add(Four("10.0.0.1"), 1));
  open_.clear();
  const FileDescriptor other(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));  // the free number

  EXPECT_TRUE(Add(Four("10.0.0.1"), 1));
}

TEST_F(PeerConnectionsTest, ForgetsAClosedConnectionOnce) {
  ASSERT_TRUE(Add(Four("10.0.0.1")));
  ASSERT_TRUE(Add(Four("10.0.0.1")));
  open_.clear();
  const FileDescriptor files[] = {FileDescriptor(dup(0)), FileDescriptor(dup(0))};
  ASSERT_TRUE(Add(Four("10.0.0.1")));  // forgets both
  ASSERT_TRUE(Add(Four("10.0.0.1")));

  EXPECT_FALSE(Add(Four("10.0.0.1")));
}

// Regression: each connection of an address with too many cost a look at all that it had.
TEST_F(PeerConnectionsTest, LooksForClosedConnectionsOncePerInterval) {
  ASSERT_TRUE(Add(Four("10.0.0.1")));
  ASSERT_TRUE(Add(Four("10.0.0.1")));
  EXPECT_FALSE(Add(Four("10.0.0.1")));  // a look, which finds both open
  open_.clear();
  const FileDescriptor files[] = {FileDescriptor(dup(0)), FileDescriptor(dup(0))};

  EXPECT_FALSE(Add(Four("10.0.0.1")));
  ASSERT_TRUE(Add(Four("10.0.0.2")));
  ASSERT_TRUE(Add(Four("10.0.0.2")));
  EXPECT_FALSE(Add(Four("10.0.0.2")));  // each peer has an interval of its own

  clock_.Advance(PeerConnections::kLookInterval);
  EXPECT_TRUE(Add(Four("10.0.0.1")));
  EXPECT_TRUE(Add(Four("10.0.0.1")));
  EXPECT_FALSE(Add(Four("10.0.0.1")));
}

TEST_F(PeerConnectionsTest, CountsRightAfterSomeOfManyAreClosed) {
  constexpr int kMost = 8;
  for (int i = 0; i < kMost; ++i) ASSERT_TRUE(Add(Four("10.0.0.1"), kMost));
  for (const size_t i : {0U, 3U, 7U}) Close(i);
  const FileDescriptor files[] = {FileDescriptor(dup(0)), FileDescriptor(dup(0)),
                                  FileDescriptor(dup(0))};

  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Add(Four("10.0.0.1"), kMost)) << i;
  EXPECT_FALSE(Add(Four("10.0.0.1"), kMost));
}

}  // namespace
}  // namespace logprobd
