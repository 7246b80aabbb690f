#include <openssl/x509v3.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"
#include "server/transport/grpc_server.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_certificates.h"
#include "tests/support/transport_server.h"

// Whom a listener with TLS lets in. The files themselves are tested in tls_files_test.cc, and the
// lists in revocation_lists_test.cc.

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kGood = 7;
constexpr int64_t kRevoked = 8;
constexpr char kServerName[] = "server.example";

/// Adds a name by which a client knows the server.
void AddServerName(X509* certificate) {
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> names(GENERAL_NAMES_new(),
                                                                            GENERAL_NAMES_free);
  GENERAL_NAME* const name = GENERAL_NAME_new();
  ASN1_IA5STRING* const text = ASN1_IA5STRING_new();
  ASN1_STRING_set(text, kServerName, sizeof(kServerName) - 1);
  GENERAL_NAME_set0_value(name, GEN_DNS, text);
  sk_GENERAL_NAME_push(names.get(), name);
  X509_set_version(certificate, X509_VERSION_3);
  X509_add1_ext_i2d(certificate, NID_subject_alt_name, names.get(), 0, 0);
}

class GrpcServerTlsTest : public ::testing::Test {
 protected:
  GrpcServerTlsTest()
      : server_pem_(CertificatePem("server", server_key_, "server", server_key_, begin_, end_, 1,
                                   /*is_ca=*/false, AddServerName)) {
    folder_.Write("cert", server_pem_);
    folder_.Write("key", KeyPem(server_key_));
    folder_.Write("client_ca", CertificatePem("ca", ca_key_, "ca", ca_key_, begin_, end_, 1, true));
    folder_.Write("lists/ca.crl", RevocationListPem("ca", ca_key_, {kRevoked}, begin_, end_));
    paths_ = {.cert = folder_.path("cert"), .key = folder_.path("key")};
  }

  void Serve() {
    auto tls = TlsFiles::Create(paths_, metrics_, Clock::Steady());
    ASSERT_TRUE(tls.ok()) << tls.status();
    tls_ = *std::move(tls);
    options_.tls = tls_.get();
    server_ = std::make_unique<TransportServer>(options_);
  }

  grpc::SslCredentialsOptions WithoutCertificate() const {
    return {.pem_root_certs = server_pem_, .pem_private_key = "", .pem_cert_chain = ""};
  }
  grpc::SslCredentialsOptions WithCertificate(int64_t serial) const {
    const TestKey key = NewKey();
    return {.pem_root_certs = server_pem_,
            .pem_private_key = KeyPem(key),
            .pem_cert_chain =
                CertificatePem("client", key, "ca", ca_key_, begin_, end_, serial, false)};
  }

  grpc::StatusCode Score(const std::shared_ptr<grpc::ChannelCredentials>& credentials) const {
    grpc::ChannelArguments arguments;
    arguments.SetSslTargetNameOverride(kServerName);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub =
        v1::Scoring::NewStub(grpc::CreateCustomChannel(server_->address(), credentials, arguments));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::ScoreResponse response;
    return stub->Score(&context, ValidRequest(), &response).error_code();
  }
  grpc::StatusCode Score(const grpc::SslCredentialsOptions& options) const {
    return Score(grpc::SslCredentials(options));
  }

  absl::Status StatusOn(const std::string& listen) {
    GrpcServer::Options options = options_;
    options.listen = listen;
    FakeRegistry registry;
    return GrpcServer::Create(options, registry, metrics_, Clock::Steady()).status();
  }

  const absl::Time begin_ = absl::Now() - absl::Hours(1);
  const absl::Time end_ = absl::Now() + absl::Hours(1);
  const TempFolder folder_;
  const TestKey server_key_ = NewKey();
  const TestKey ca_key_ = NewKey();
  const std::string server_pem_;
  Metrics metrics_{Metrics::Options()};
  TlsFiles::Options paths_;
  std::unique_ptr<TlsFiles> tls_;
  GrpcServer::Options options_ = TestServerOptions();
  std::unique_ptr<TransportServer> server_;
};

TEST_F(GrpcServerTlsTest, WithoutACaOfClientsEverybodyWhoSpeaksTlsIsServed) {
  Serve();

  EXPECT_EQ(Score(WithoutCertificate()), grpc::StatusCode::OK);
  EXPECT_EQ(Score(WithCertificate(kGood)), grpc::StatusCode::OK);
  EXPECT_EQ(Score(grpc::InsecureChannelCredentials()), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(GrpcServerTlsTest, WithACaOfClientsOnlyTheyAreServed) {
  paths_.client_ca = folder_.path("client_ca");
  Serve();

  EXPECT_EQ(Score(WithCertificate(kGood)), grpc::StatusCode::OK);
  EXPECT_EQ(Score(WithCertificate(kRevoked)), grpc::StatusCode::OK);  // there are no lists
  EXPECT_EQ(Score(WithoutCertificate()), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(GrpcServerTlsTest, ARevokedClientIsNotServed) {
  paths_.client_ca = folder_.path("client_ca");
  paths_.crl_dir = folder_.path("lists");
  Serve();

  EXPECT_EQ(Score(WithCertificate(kGood)), grpc::StatusCode::OK);
  EXPECT_EQ(Score(WithCertificate(kRevoked)), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(metrics_.Serialize(),
              HasSubstr("logprobd_tls_refused_certificates_total{reason=\"revoked\"}"));
}

TEST_F(GrpcServerTlsTest, ATokenCountsAlsoOverTls) {
  options_.access = std::make_shared<AccessList>(std::vector<AccessEntry>());
  Serve();

  EXPECT_EQ(Score(WithoutCertificate()), grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(GrpcServerTlsTest, APublicAddressNeedsAlsoAProofOfWhoCalls) {
  Serve();
  EXPECT_EQ(StatusOn("0.0.0.0:0").code(), absl::StatusCode::kFailedPrecondition);

  options_.access = std::make_shared<AccessList>(std::vector<AccessEntry>());
  EXPECT_TRUE(StatusOn("0.0.0.0:0").ok()) << StatusOn("0.0.0.0:0");
  options_.tls = nullptr;
  EXPECT_EQ(StatusOn("0.0.0.0:0").code(), absl::StatusCode::kFailedPrecondition);

  options_.access = nullptr;
  paths_.client_ca = folder_.path("client_ca");
  Serve();
  EXPECT_TRUE(StatusOn("0.0.0.0:0").ok()) << StatusOn("0.0.0.0:0");
}

}  // namespace
}  // namespace logprobd::testing
