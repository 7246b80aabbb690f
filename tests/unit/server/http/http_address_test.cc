#include "server/http/http_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace logprobd {
namespace {

TEST(HttpAddressTest, SplitsHostAndPort) {
  const auto name = ParseHttpAddress("localhost:0");
  ASSERT_TRUE(name.ok());
  EXPECT_EQ(name->host, "localhost");
  EXPECT_EQ(name->port, 0);

  const auto ipv6 = ParseHttpAddress("[::1]:9470");
  ASSERT_TRUE(ipv6.ok());
  EXPECT_EQ(ipv6->host, "::1");
  EXPECT_EQ(ipv6->port, 9'470);
}

TEST(HttpAddressTest, TellsLoopbackFromPublic) {
  for (const char* text : {"localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1"}) {
    EXPECT_TRUE(ParseHttpAddress(text)->is_loopback) << text;
  }
  for (const char* text : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "127.evil.example:1", "host:1"}) {
    EXPECT_FALSE(ParseHttpAddress(text)->is_loopback) << text;
  }
}

TEST(HttpAddressTest, RefusesWhatIsNoAddressAndNamesIt) {
  for (const char* text : {"", ":9470", "9470", "host:", "host:x", "host:-1", "host:65536",
                           "host: 1", "::1:9470", "[::1:9470", "host:99999999999999999999"}) {
    const auto address = ParseHttpAddress(text);
    EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(address.status().message()),
                ::testing::HasSubstr(std::string("\"") + text + "\""));
  }
}

}  // namespace
}  // namespace logprobd
