#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/http/http_server.h"
#include "tests/support/fake_clock.h"
#include "tests/support/few_files.h"
#include "tests/support/test_certificates.h"
#include "tests/unit/server/http/http_client.h"

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kBegunRequest[] = "GET /healthz HTTP/1.1\r\nHost: x\r\n";
/// A record of TLS that begins a ClientHello of 512 bytes, and one byte of it.
const std::string kBegunHandshake("\x16\x03\x01\x02\x00\x01", 6);

/// A certificate of `name` and its key.
HttpServer::Certificate Issue(const std::string& name) {
  const TestKey key = NewKey();
  const absl::Time now = absl::Now();
  return {
      .cert_pem = CertificatePem(name, key, name, key, now - absl::Hours(1), now + absl::Hours(1)),
      .key_pem = KeyPem(key)};
}

/// A client that trusts every certificate.
class TlsClient {
 public:
  explicit TlsClient(int fd, int version_max = TLS1_3_VERSION)
      : fd_(fd), context_(SSL_CTX_new(TLS_client_method()), SSL_CTX_free) {
    SSL_CTX_set_max_proto_version(context_.get(), version_max);
    SSL_CTX_set_cipher_list(context_.get(), "DEFAULT@SECLEVEL=0");  // for old versions
    ssl_ = {SSL_new(context_.get()), SSL_free};
    SSL_set_fd(ssl_.get(), fd_);
    is_connected_ = SSL_connect(ssl_.get()) == 1;
  }
  ~TlsClient() { close(fd_); }
  TlsClient(const TlsClient&) = delete;
  TlsClient& operator=(const TlsClient&) = delete;

  bool is_connected() const { return is_connected_; }
  std::string version() const { return SSL_get_version(ssl_.get()); }

  /// Returns the name of the server's certificate.
  std::string name() const {
    const std::unique_ptr<X509, decltype(&X509_free)> shown(SSL_get1_peer_certificate(ssl_.get()),
                                                            X509_free);
    char name[64] = "";
    X509_NAME_get_text_by_NID(X509_get_subject_name(shown.get()), NID_commonName, name,
                              sizeof(name));
    return name;
  }

  void Send(const std::string& text) {
    SSL_write(ssl_.get(), text.data(), static_cast<int>(text.size()));
  }

  std::string ReadToEnd() {
    std::string text;
    char buffer[4096];
    for (int got = 0; (got = SSL_read(ssl_.get(), buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, static_cast<size_t>(got));
    }
    return text;
  }

  std::string Get(const std::string& path) {
    Send(absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\n\r\n"));
    return ReadToEnd();
  }

 private:
  const int fd_;
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl_{nullptr, SSL_free};
  bool is_connected_ = false;
};

class HttpServerTlsTest : public ::testing::Test {
 protected:
  HttpServerTlsTest() {
    options_.listen = "https://127.0.0.1:0";
    options_.certificate = Issue("first");
    options_.status_text = [] { return std::string(1 << 20, 'x'); };  // more than a socket holds
    auto server = HttpServer::Create(options_, metrics_, clock_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  int port() const { return server_->port(); }

  std::string Get(const std::string& path) { return TlsClient(Connect(port())).Get(path); }

  /// Opens connections from `source` with begun handshakes.
  std::vector<int> Begin(const char* source, size_t count) const {
    std::vector<int> begun;
    for (size_t i = 0; i < count; ++i) {
      begun.push_back(Connect(port(), source));
      Send(begun.back(), kBegunHandshake);
    }
    return begun;
  }

  HttpServer::Options options_;
  const Metrics metrics_{{.heads = {"default"}}};
  FakeClock clock_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTlsTest, ServesAllPagesOverTls) {
  TlsClient client(Connect(port()));

  EXPECT_EQ(client.version(), "TLSv1.3");
  EXPECT_EQ(client.name(), "first");
  EXPECT_THAT(client.Get("/healthz"), AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("\r\n\r\nok\n")));
  EXPECT_THAT(Get("/metrics"), AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("logprobd_")));
  EXPECT_THAT(Get("/"), HasSubstr(std::string(1 << 20, 'x')));
  EXPECT_THAT(Get("/nothing"), StartsWith("HTTP/1.1 404"));
}

TEST_F(HttpServerTlsTest, SpeaksNoVersionBefore12) {
  TlsClient oldest_allowed(Connect(port()), TLS1_2_VERSION);
  EXPECT_EQ(oldest_allowed.version(), "TLSv1.2");
  EXPECT_THAT(oldest_allowed.Get("/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_FALSE(TlsClient(Connect(port()), TLS1_1_VERSION).is_connected());
}

TEST_F(HttpServerTlsTest, AnswersNothingToAClientWithoutTls) {
  const int fd = Connect(port());
  Send(fd, absl::StrCat(kBegunRequest, "\r\n"));
  EXPECT_EQ(ReadToEnd(fd).find("HTTP/1.1"), std::string::npos);

  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTlsTest, CutsAHandshakeThatIsNotFinishedInTime) {
  const int silent = Connect(port());
  const int begun = Begin("127.0.0.1", 1).front();
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));  // both are accepted now

  clock_.Advance(HttpServer::kExchangeTimeout - absl::Milliseconds(1));
  Send(begun, "x");  // does not extend the time
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_TRUE(IsSilent(begun));
  EXPECT_TRUE(IsSilent(silent));
  clock_.Advance(absl::Milliseconds(1));
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));  // makes the server look

  EXPECT_TRUE(IsCut(begun));
  EXPECT_TRUE(IsCut(silent));
}

TEST_F(HttpServerTlsTest, CutsARequestThatIsNotFinishedInTime) {
  TlsClient client(Connect(port()));
  client.Send(kBegunRequest);
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));

  clock_.Advance(HttpServer::kExchangeTimeout);
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_EQ(client.ReadToEnd(), "");
}

TEST_F(HttpServerTlsTest, AnswersHealthAtOnceWhileHandshakesAreNotFinished) {
  constexpr size_t kHalf = HttpServer::kConnectionsMax / 2;
  const std::vector<int> older = Begin("127.0.0.2", kHalf);
  const std::vector<int> newer = Begin("127.0.0.3", kHalf);

  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_TRUE(IsCut(older.front()));  // the oldest one made room
  EXPECT_TRUE(IsSilent(older[1]));
  EXPECT_TRUE(IsSilent(newer.back()));
}

TEST_F(HttpServerTlsTest, ReplacesTheOldestHandshakeOfAnAddressWithTooMany) {
  const std::vector<int> begun = Begin("127.0.0.1", HttpServer::kAddressConnectionsMax);

  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));

  EXPECT_TRUE(IsCut(begun.front()));
  EXPECT_TRUE(IsSilent(begun[1]));
}

TEST_F(HttpServerTlsTest, CutsHeadersWithoutEnd) {
  TlsClient client(Connect(port()));
  client.Send("GET /healthz HTTP/1.1\r\n");
  const std::string line = absl::StrCat("X: ", std::string(1'000, 'x'), "\r\n");
  for (size_t sent = 0; sent < 2 * HttpServer::kRequestBytesMax; sent += line.size()) {
    client.Send(line);
  }

  EXPECT_EQ(client.ReadToEnd().find("HTTP/1.1 200"), std::string::npos);
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
}

// Regression: GnuTLS kept a ClientHello of up to 16 MiB of each connection.
TEST_F(HttpServerTlsTest, CutsAHandshakeOfTooManyBytes) {
  constexpr size_t kHeaderBytes = 5;
  const auto begin_handshake = [this](size_t bytes) {
    std::string records;
    std::string message("\x01\xff\xff\xff\x03\x03", 6);  // a ClientHello of 2^24 - 1 bytes
    while (records.size() < bytes) {
      message.resize(std::min<size_t>(bytes - records.size() - kHeaderBytes, 16'384), '\0');
      records += std::string("\x16\x03\x01", 3);
      records += static_cast<char>(message.size() >> 8);
      records += static_cast<char>(message.size() & 0xFF);
      records += message;
      message.clear();
    }
    const int fd = Connect(port());
    Send(fd, records);
    EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));  // the server has read the records
    return fd;
  };

  EXPECT_TRUE(IsSilent(begin_handshake(HttpServer::kTlsBytesMax - 1)));
  EXPECT_TRUE(IsCut(begin_handshake(HttpServer::kTlsBytesMax)));
  EXPECT_TRUE(IsCut(begin_handshake(HttpServer::kTlsBytesMax + kHeaderBytes + 1)));
}

TEST_F(HttpServerTlsTest, ARequestOfTheLongestHeadersFitsBesideItsHandshake) {
  TlsClient client(Connect(port()));
  client.Send("GET /healthz HTTP/1.1\r\n");
  for (int i = 0; i < 8; ++i) {
    client.Send(absl::StrCat("X: ", std::string(1'000, 'x'), "\r\n"));
  }
  client.Send("\r\n");

  EXPECT_THAT(client.ReadToEnd(), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTlsTest, GivesNewConnectionsTheNewCertificateAndOldOnesTheirAnswer) {
  TlsClient before(Connect(port()));
  before.Send(kBegunRequest);

  for (const std::string name : {"second", "third"}) {
    ASSERT_TRUE(server_->SetCertificate(Issue(name)).ok());
    TlsClient after(Connect(port()));
    EXPECT_EQ(after.name(), name);
    EXPECT_THAT(after.Get("/metrics"), StartsWith("HTTP/1.1 200"));
  }

  before.Send("\r\n");
  EXPECT_THAT(before.ReadToEnd(), StartsWith("HTTP/1.1 200"));
  EXPECT_EQ(before.name(), "first");
}

TEST_F(HttpServerTlsTest, NeedsACertificateAndItsKeyOnlyDuringTheCall) {
  HttpServer::Certificate other = Issue("second");
  ASSERT_TRUE(server_->SetCertificate(other).ok());

  absl::c_fill(other.cert_pem, 'x');
  absl::c_fill(other.key_pem, 'x');

  TlsClient after(Connect(port()));
  EXPECT_EQ(after.name(), "second");
  EXPECT_THAT(after.Get("/healthz"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTlsTest, TheLimitsHoldAcrossCertificates) {
  const std::vector<int> before = Begin("127.0.0.1", HttpServer::kAddressConnectionsMax);
  EXPECT_THAT(TlsClient(Connect(port(), "127.0.0.2")).Get("/healthz"), StartsWith("HTTP/1.1 200"));
  ASSERT_TRUE(server_->SetCertificate(Issue("second")).ok());

  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_TRUE(IsCut(before.front()));
  clock_.Advance(HttpServer::kExchangeTimeout);
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_TRUE(IsCut(before.back()));
}

TEST_F(HttpServerTlsTest, KeepsItsCertificateIfAnotherOneCannotBeUsed) {
  HttpServer::Certificate other = Issue("other");
  other.key_pem = Issue("another").key_pem;

  for (const HttpServer::Certificate& bad : {other, HttpServer::Certificate()}) {
    errno = EMFILE;  // of an earlier call, which says nothing of this one
    const absl::Status status = server_->SetCertificate(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), StartsWith("--http: "));
  }

  EXPECT_EQ(TlsClient(Connect(port())).name(), "first");
}

TEST_F(HttpServerTlsTest, KeepsItsCertificateIfNoFileIsLeftForAnotherOne) {
  const HttpServer::Certificate other = Issue("other");
  absl::Status status;
  {
    const FewFiles none(0);
    status = server_->SetCertificate(other);
  }

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith("--http: cannot start the server: "));
  EXPECT_EQ(TlsClient(Connect(port())).name(), "first");
  EXPECT_TRUE(server_->SetCertificate(other).ok());
  EXPECT_EQ(TlsClient(Connect(port())).name(), "other");
}

TEST_F(HttpServerTlsTest, AnEarlierCertificateTakesNoFilesOnceItsConnectionsHaveEnded) {
  const auto num_open_at_rest = [this] {  // the server closes a connection after its client has
    EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
    EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
    return CountOpenFiles();
  };
  const int num_open = num_open_at_rest();
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(server_->SetCertificate(Issue("next")).ok());
    EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
  }

  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (num_open_at_rest() > num_open && absl::Now() < end) {
  }

  EXPECT_LE(num_open_at_rest(), num_open);
}

TEST_F(HttpServerTlsTest, DoesNotStartWithoutAUsableCertificate) {
  options_.certificate.key_pem = Issue("other").key_pem;
  EXPECT_EQ(HttpServer::Create(options_, metrics_).status().code(),
            absl::StatusCode::kInvalidArgument);
  options_.certificate = {};
  EXPECT_EQ(HttpServer::Create(options_, metrics_).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(HttpServerTlsTest, EndsWhileHandshakesAndResponsesAreNotFinished) {
  const std::vector<int> begun = Begin("127.0.0.1", 4);
  TlsClient unread(Connect(port()));
  unread.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
  ASSERT_TRUE(server_->SetCertificate(Issue("second")).ok());

  server_.reset();

  for (const int fd : begun) {
    EXPECT_TRUE(IsCut(fd));
  }
}

TEST(HttpServerWithoutTlsTest, IgnoresCertificates) {
  const Metrics metrics{{.heads = {"default"}}};
  HttpServer::Options options;
  options.listen = "127.0.0.1:0";
  const auto server = *HttpServer::Create(options, metrics);

  {
    const FewFiles none(0);  // nothing is started for it
    EXPECT_TRUE(server->SetCertificate({}).ok());
  }
  const int fd = Connect(server->port());
  Send(fd, absl::StrCat(kBegunRequest, "\r\n"));
  EXPECT_THAT(ReadToEnd(fd), StartsWith("HTTP/1.1 200"));
}

}  // namespace
}  // namespace logprobd::testing
