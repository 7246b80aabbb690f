#include "server/transport/call_info.h"

#include <string>
#include <thread>

#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"

namespace logprobd {
namespace {

using internal::ClientId;

TEST(CallInfoTest, AClientWithoutAnIdIsItsAddressWithoutThePort) {
  EXPECT_EQ(ClientId("", "ipv4:10.0.0.7:50312"), "ipv4:10.0.0.7");
  EXPECT_EQ(ClientId("", "ipv6:%5B::1%5D:50312"), "ipv6:%5B::1%5D");
  EXPECT_EQ(ClientId("", "unix:"), "unix");
  EXPECT_EQ(ClientId("", "unix:/run/a:b.sock"), "unix");
}

TEST(CallInfoTest, AClaimedIdIsCutAndCleaned) {
  EXPECT_EQ(ClientId("trainer-7/eval@host:1.2_x", "unix:"), "trainer-7/eval@host:1.2_x");
  EXPECT_EQ(ClientId("a b\n\x1B[31m\xC3\xA9", "unix:"), "a_b___31m__");
  EXPECT_EQ(ClientId(std::string(200, 'a'), "unix:"), std::string(64, 'a'));
}

TEST(CallInfoTest, TheNetworkOfAPeerIsItsIpv4AddressOrTheFirstHalfOfItsIpv6Address) {
  EXPECT_EQ(PeerNetworkOf("ipv4:10.0.0.7:1"), PeerNetworkOf("ipv4:10.0.0.7:2"));
  EXPECT_NE(PeerNetworkOf("ipv4:10.0.0.7:1"), PeerNetworkOf("ipv4:10.0.0.8:1"));
  EXPECT_EQ(PeerNetworkOf("ipv4:10.0.0.7:1"), std::string("\x0A\0\0\x07", 4));

  const std::string six = PeerNetworkOf("ipv6:%5B2001:db8:0:1::1%5D:1");
  EXPECT_EQ(six, std::string("\x20\x01\x0D\xB8\0\0\0\x01", 8));
  EXPECT_EQ(six, PeerNetworkOf("ipv6:[2001:db8:0:1:ffff::2]:50312"));
  EXPECT_EQ(six, PeerNetworkOf("ipv6:%5B2001:db8:0:1::3%25eth0%5D:2"));
  EXPECT_NE(six, PeerNetworkOf("ipv6:%5B2001:db8:0:2::1%5D:1"));

  EXPECT_EQ(PeerNetworkOf("unix:"), "unix");
  // A text that is no address is a network of its own, without its port.
  EXPECT_EQ(PeerNetworkOf("ipv4:here:1"), "ipv4:here");
  EXPECT_EQ(PeerNetworkOf("ipv6:%5Bhere%5D:1"), "ipv6:%5Bhere%5D");
}

// Setting the wall clock an hour forward or back must not expire a request.
TEST(CallInfoTest, ADeadlineKeepsItsDistanceWhenTheWallClockSteps) {
  testing::FakeClock clock;
  absl::Time wall = absl::FromUnixSeconds(1'700'000'000);
  int readings = 0;
  const auto wall_now = [&] {
    ++readings;
    return wall;
  };

  const absl::Time before = internal::DeadlineOn(clock, wall + absl::Seconds(3), wall_now);
  for (const absl::Duration step : {absl::Hours(1), -absl::Hours(2)}) {
    wall += step;
    EXPECT_EQ(before - clock.Now(), absl::Seconds(3));
    // gRPC reports a deadline as wall-clock time.
    EXPECT_EQ(internal::DeadlineOn(clock, wall + absl::Seconds(3), wall_now), before);
  }
  EXPECT_EQ(readings, 3);  // once per call
}

TEST(WorkCountTest, WaitsForTheLastRequest) {
  testing::FakeClock clock;
  WorkCount work;
  work.Begin();
  work.Begin();
  work.End();
  const absl::Time until = clock.Now() + absl::Seconds(10);

  std::thread last([&] {
    clock.WaitForWaiter(until);
    work.End();
  });

  EXPECT_TRUE(work.AwaitNone(clock, until));
  last.join();
}

TEST(WorkCountTest, StopsWaitingAtTheGivenTime) {
  testing::FakeClock clock;
  WorkCount work;
  work.Begin();
  const absl::Time until = clock.Now() + absl::Seconds(10);

  std::thread time([&] {
    clock.WaitForWaiter(until);
    clock.Advance(absl::Seconds(10));
  });

  EXPECT_FALSE(work.AwaitNone(clock, until));
  EXPECT_EQ(work.count(), 1);
  time.join();
}

}  // namespace

}  // namespace logprobd
