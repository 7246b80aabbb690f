#include "server/base/listen_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

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

TEST(ListenAddressTest, AnHttpAddressMayHaveTls) {
  const auto secure = ParseHttpAddress("--http", "https://[::]:9470");
  ASSERT_TRUE(secure.ok()) << secure.status();
  EXPECT_TRUE(secure->is_https);
  EXPECT_EQ(secure->host, "::");
  EXPECT_EQ(secure->ToString(), "https://[::]:9470");
  EXPECT_EQ(ParseHttpAddress("--http", "https://a:1")->ToString(), "https://a:1");
  EXPECT_FALSE(ParseHttpAddress("--http", "127.0.0.1:9470")->is_https);
  for (const char* text : {"https://", "https://a", "http://a:1", "https://https://a:1"}) {
    EXPECT_FALSE(ParseHttpAddress("--http", text).ok()) << text;
  }
  EXPECT_FALSE(ParseListenAddress("--listen", "https://a:1").ok());
}

TEST(ListenAddressTest, TheLargestPortIs65535) {
  EXPECT_EQ(ParseListenAddress("--listen", "127.0.0.1:65535")->port, 65'535);
}

// All clients of IPv4 would count as one network of IPv6.
TEST(ListenOnTest, AnIpv6AddressLeavesItsPortToIpv4) {
  absl::Status status;
  // Another process may have the port of IPv4.
  for (int attempt = 0; attempt < 10; ++attempt) {
    const auto six = ListenOn("--listen", *ParseListenAddress("--listen", "[::]:0"));
    if (!six.ok()) {
      GTEST_SKIP() << "this host has no IPv6";
    }
    status =
        ListenOn("--listen", *ParseListenAddress("--listen", absl::StrCat("0.0.0.0:", six->port)))
            .status();
    if (status.ok()) break;
  }

  EXPECT_TRUE(status.ok()) << status;
}

TEST(CheckReachableTest, OtherHostsNeedHttpsAndTokensForHttp) {
  const ListenAddress plain = *ParseHttpAddress("--http", "0.0.0.0:9470");
  const ListenAddress https = *ParseHttpAddress("--http", "https://0.0.0.0:9470");
  const auto check = [](const ListenAddress& address, bool has_tokens, bool insecure = false) {
    const ListenerSecurity has = {
        .has_tls = address.is_https, .has_tokens = has_tokens, .is_http = true};
    return std::string(CheckReachable("--http", address, has, insecure).message());
  };
  const std::string way_out =
      "pass --insecure to allow that, or use a loopback address such as 127.0.0.1";

  EXPECT_EQ(check(plain, false),
            "--http: 0.0.0.0:9470 can be reached from other hosts without authentication over TLS; "
            "write https://0.0.0.0:9470 and give --tls-cert, --tls-key and --tokens, " +
                way_out);
  EXPECT_EQ(check(https, false),
            "--http: https://0.0.0.0:9470 can be reached from other hosts without authentication "
            "over TLS; give --tls-cert, --tls-key and --tokens, " +
                way_out);
  EXPECT_EQ(check(https, true), "");
  EXPECT_EQ(check(plain, false, /*insecure=*/true), "");
  EXPECT_EQ(check(https, false, /*insecure=*/true), "");
  const std::string in_the_clear =
      "--http: 0.0.0.0:9470 is not a loopback address, and tokens would cross the network "
      "unencrypted; write https://0.0.0.0:9470 and give --tls-cert and --tls-key";
  EXPECT_EQ(check(plain, true), in_the_clear);
  EXPECT_EQ(check(plain, true, /*insecure=*/true), in_the_clear);
  for (const bool has_tokens : {false, true}) {
    EXPECT_EQ(check(*ParseHttpAddress("--http", "127.0.0.1:9470"), has_tokens), "");
    EXPECT_EQ(check(*ParseHttpAddress("--http", "https://[::1]:9470"), has_tokens), "");
  }
}

TEST(CheckReachableTest, OtherHostsNeedTlsWithCertificatesOrTokensOrAnExplicitFlag) {
  const ListenAddress open = *ParseListenAddress("--listen", "0.0.0.0:8470");
  const ListenAddress loopback = *ParseListenAddress("--listen", "127.0.0.1:8470");
  for (const bool has_tls : {false, true}) {
    for (const bool has_certificates : {false, true}) {
      for (const bool has_tokens : {false, true}) {
        for (const bool insecure : {false, true}) {
          const ListenerSecurity security = {has_tls, has_certificates, has_tokens};
          const bool expected =
              has_tls ? has_certificates || has_tokens || insecure : insecure && !has_tokens;
          const absl::Status status = CheckReachable("--listen", open, security, insecure);
          EXPECT_EQ(status.ok(), expected) << status;
          EXPECT_TRUE(CheckReachable("--listen", loopback, security, insecure).ok());
        }
      }
    }
  }
}

TEST(CheckReachableTest, AListenerThatChangesWeightsNeedsAuthenticationOnLoopbackToo) {
  const ListenAddress loopback = *ParseListenAddressOrPath("--admin", "127.0.0.1:8471");
  ListenerSecurity security = {.changes_weights = true};
  const absl::Status refused = CheckReachable("--admin", loopback, security, /*insecure=*/false);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(), HasSubstr("every user of this host"));
  EXPECT_TRUE(CheckReachable("--admin", loopback, security, /*insecure=*/true).ok());
  security.has_tokens = true;  // another user could listen on the port and read the token
  EXPECT_FALSE(CheckReachable("--admin", loopback, security, /*insecure=*/false).ok());
  EXPECT_TRUE(CheckReachable("--admin", loopback, security, /*insecure=*/true).ok());
  security.has_tls = true;
  EXPECT_TRUE(CheckReachable("--admin", loopback, security, /*insecure=*/false).ok());

  const ListenAddress path = *ParseListenAddressOrPath("--admin", "unix:/run/admin.sock");
  EXPECT_EQ(path.ToString(), "unix:/run/admin.sock");
  EXPECT_TRUE(CheckReachable("--admin", path, {.changes_weights = true}, false).ok());
  EXPECT_FALSE(ParseListenAddressOrPath("--admin", "unix:relative").ok());
  EXPECT_FALSE(ParseListenAddress("--http", "unix:/run/admin.sock").ok());
}

}  // namespace
}  // namespace logprobd
