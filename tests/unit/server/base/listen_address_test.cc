#include "server/base/listen_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace logprobd {
namespace {

using ::testing::HasSubstr;

TEST(ListenAddressTest, ReadsHostsAndPorts) {
  const auto plain = ParseListenAddress("--listen", "127.0.0.1:8470");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->host, "127.0.0.1");
  EXPECT_EQ(plain->port, 8'470);
  EXPECT_EQ(plain->ToString(), "127.0.0.1:8470");

  const auto ipv6 = ParseListenAddress("--listen", "[::1]:0");
  ASSERT_TRUE(ipv6.ok()) << ipv6.status();
  EXPECT_EQ(ipv6->host, "::1");
  EXPECT_EQ(ipv6->ToString(), "[::1]:0");
}

TEST(ListenAddressTest, RecognisesLoopbackAddresses) {
  for (const char* text : {"127.0.0.1:1", "127.5.0.1:1", "localhost:1", "[::1]:1"}) {
    EXPECT_TRUE(ParseListenAddress("--listen", text)->is_loopback) << text;
  }
  for (const char* text : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example:1", "127.evil.org:1"}) {
    EXPECT_FALSE(ParseListenAddress("--listen", text)->is_loopback) << text;
  }
}

TEST(ListenAddressTest, NamesTheFlagOfABadAddress) {
  for (const char* text : {"", "8470", "127.0.0.1", "127.0.0.1:", ":8470", "127.0.0.1:x",
                           "127.0.0.1:65536", "127.0.0.1:-1", "::1:8470", "[]:1", "127.0.0.1: 1",
                           "[::1:9470", "host:99999999999999999999"}) {
    const auto address = ParseListenAddress("--listen", text);
    EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(address.status().message()), HasSubstr("--listen")) << text;
  }
}

TEST(ListenAddressTest, APublicAddressNeedsInsecure) {
  const auto open = ParseListenAddress("--http", "[::]:9470");

  const absl::Status refused = CheckLoopback("--http", *open, /*insecure=*/false);

  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--http: [::]:9470 can be reached"));
  EXPECT_TRUE(CheckLoopback("--http", *open, /*insecure=*/true).ok());
  EXPECT_TRUE(CheckLoopback("--http", *ParseListenAddress("--http", "[::1]:1"), false).ok());
}

TEST(ListenAddressTest, APublicAddressMayBeUsedWithClientCertificates) {
  const auto open = ParseListenAddress("--listen", "0.0.0.0:8470");

  const absl::Status refused = CheckLoopback("--listen", *open, false, ClientCertificates::kOff);

  EXPECT_THAT(std::string(refused.message()), HasSubstr("--tls-client-ca"));
  EXPECT_TRUE(CheckLoopback("--listen", *open, false, ClientCertificates::kRequired).ok());
}

}  // namespace
}  // namespace logprobd
