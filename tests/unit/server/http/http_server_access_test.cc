#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/http/http_server.h"
#include "tests/support/test_certificates.h"
#include "tests/unit/server/http/http_client.h"

// Who may have which page, and which addresses are refused.

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kRefused[] = "HTTP/1.1 401 Unauthorized\r\n";

class HttpServerAccessTest : public ::testing::Test {
 protected:
  HttpServerAccessTest() {
    options_.listen = "127.0.0.1:0";
    options_.check_access = [this](absl::string_view path, absl::string_view authorization,
                                   absl::string_view peer) {
      const absl::MutexLock lock(&mutex_);
      checked_.push_back(absl::StrCat(path, " ", authorization));
      peer_ = std::string(peer);
      return access_;
    };
  }

  void Create() {
    auto server = HttpServer::Create(options_, metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  std::string Get(const std::string& path, const std::string& method = "GET") {
    return GetFrom(Connect(server_->port()), path, method);
  }
  static std::string GetFrom(int fd, const std::string& path, const std::string& method = "GET") {
    Send(fd,
         absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: x\r\nauthorization: secret\r\n\r\n"));
    return ReadToEnd(fd);
  }

  std::vector<std::string> checked() {
    const absl::MutexLock lock(&mutex_);
    return checked_;
  }

  std::string peer() {
    const absl::MutexLock lock(&mutex_);
    return peer_;
  }

  absl::Status access_ = absl::UnauthenticatedError("authorization: missing");
  HttpServer::Options options_;
  const Metrics metrics_{{.heads = {"default"}}};
  std::unique_ptr<HttpServer> server_;

 private:
  absl::Mutex mutex_;
  std::vector<std::string> checked_ ABSL_GUARDED_BY(mutex_);
  std::string peer_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(HttpServerAccessTest, HealthIsOpenToEverybody) {
  Create();

  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get("/metrics", "POST"), StartsWith("HTTP/1.1 405"));

  EXPECT_THAT(checked(), IsEmpty());
}

TEST_F(HttpServerAccessTest, EveryOtherPathNeedsAccess) {
  Create();

  for (const char* path : {"/metrics", "/", "/nothing", "/readyz/"}) {
    EXPECT_THAT(Get(path),
                AllOf(StartsWith(kRefused), HasSubstr("\r\nWWW-Authenticate: Bearer\r\n"),
                      HasSubstr("\r\nWWW-Authenticate: Basic realm=\"logprobd\"\r\n"),
                      HasSubstr("\r\n\r\nauthorization: missing\n")))
        << path;
  }
  EXPECT_THAT(Get("/metrics", "HEAD"), AllOf(StartsWith(kRefused), Not(HasSubstr("missing"))));

  EXPECT_THAT(checked(), ElementsAre("/metrics secret", "/ secret", "/nothing secret",
                                     "/readyz/ secret", "/metrics secret"));
}

TEST_F(HttpServerAccessTest, TheCheckGetsTheAddressOfTheCaller) {
  Create();
  const int fd = Connect(server_->port());
  sockaddr_in own{};
  socklen_t length = sizeof(own);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length), 0);

  GetFrom(fd, "/metrics");

  EXPECT_EQ(peer(), absl::StrCat("ipv4:127.0.0.1:", ntohs(own.sin_port)));
}

TEST_F(HttpServerAccessTest, TheCheckGetsAnIpv6AddressInBrackets) {
  options_.listen = "[::1]:0";
  auto server = HttpServer::Create(options_, metrics_);
  if (!server.ok()) {
    GTEST_SKIP() << "this host has no IPv6";
  }
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(static_cast<uint16_t>((*server)->port()));
  address.sin6_addr = in6addr_loopback;
  const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  sockaddr_in6 own{};
  socklen_t length = sizeof(own);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length), 0);

  GetFrom(fd, "/metrics");

  EXPECT_EQ(peer(), absl::StrCat("ipv6:[::1]:", ntohs(own.sin6_port)));
}

TEST_F(HttpServerAccessTest, ACallerWithoutTheScopeIsForbidden) {
  access_ = absl::PermissionDeniedError("lacks the scope metrics");
  Create();

  EXPECT_THAT(Get("/metrics"),
              AllOf(StartsWith("HTTP/1.1 403 Forbidden\r\n"),
                    HasSubstr("lacks the scope metrics\n"), Not(HasSubstr("WWW-Authenticate"))));
}

TEST_F(HttpServerAccessTest, ACallerWithAccessGetsThePages) {
  access_ = absl::OkStatus();
  Create();

  EXPECT_THAT(Get("/metrics"), AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("logprobd_")));
  EXPECT_THAT(Get("/"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get("/nothing"), StartsWith("HTTP/1.1 404"));
}

TEST_F(HttpServerAccessTest, APublicAddressNeedsTlsAndAccessOrInsecure) {
  const TestKey key = NewKey();
  const absl::Time now = absl::Now();
  options_.certificate = {.cert_pem = CertificatePem("a", key, "a", key, now, now + absl::Hours(1)),
                          .key_pem = KeyPem(key)};
  const auto check_access = std::exchange(options_.check_access, nullptr);
  const auto refusal = [this](const std::string& listen) {
    options_.listen = listen;
    const absl::Status status = HttpServer::Create(options_, metrics_).status();
    EXPECT_TRUE(status.ok() || absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  };

  EXPECT_THAT(refusal("0.0.0.0:0"), StartsWith("--http: 0.0.0.0:0 can be reached"));
  EXPECT_THAT(refusal("https://0.0.0.0:0"), StartsWith("--http: https://0.0.0.0:0 can be reached"));
  options_.insecure = true;
  EXPECT_EQ(refusal("0.0.0.0:0"), "");
  EXPECT_EQ(refusal("https://0.0.0.0:0"), "");
  options_.check_access = check_access;
  EXPECT_THAT(refusal("0.0.0.0:0"), HasSubstr("tokens would cross the network unencrypted"));
  options_.insecure = false;
  EXPECT_THAT(refusal("0.0.0.0:0"), HasSubstr("tokens would cross the network unencrypted"));
  EXPECT_EQ(refusal("https://0.0.0.0:0"), "");
  EXPECT_EQ(refusal("127.0.0.1:0"), "");
}

}  // namespace
}  // namespace logprobd::testing
