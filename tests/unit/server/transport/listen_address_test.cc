#include "server/transport/listen_address.h"

#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

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

TEST(ListenAddressTest, KnowsLoopback) {
  for (const char* text : {"127.0.0.1:1", "127.5.0.1:1", "localhost:1", "[::1]:1"}) {
    EXPECT_TRUE(ParseListenAddress("--listen", text)->is_loopback) << text;
  }
  for (const char* text : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example:1", "127.evil.org:1"}) {
    EXPECT_FALSE(ParseListenAddress("--listen", text)->is_loopback) << text;
  }
}

TEST(ListenAddressTest, NamesTheFlagOfABadAddress) {
  for (const char* text : {"", "8470", "127.0.0.1", "127.0.0.1:", ":8470", "127.0.0.1:x",
                           "127.0.0.1:65536", "127.0.0.1:-1", "::1:8470", "[]:1", "127.0.0.1: 1"}) {
    const auto address = ParseListenAddress("--listen", text);
    EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(address.status().message()), HasSubstr("--listen")) << text;
  }
}

TEST(ListenAddressTest, LeavesFilesAloneThatAreNoSocket) {
  const std::string path = ::testing::TempDir() + "/listen_address_test.file";
  std::ofstream(path) << "precious";

  const absl::Status status = CheckSocketPath("--local", path);

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(CheckSocketPath("--local", path + ".absent").ok());
  EXPECT_EQ(CheckSocketPath("--local", std::string(200, 'a')).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace logprobd
