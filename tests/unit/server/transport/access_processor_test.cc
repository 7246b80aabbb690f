#include "server/transport/access_processor.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "grpc/grpc_security_constants.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

AccessEntry Token(const std::string& id, const std::string& text) {
  Sha256 sha256;
  sha256.Add({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  AccessEntry token;
  token.id = id;
  token.tenant = "tenant-of-" + id;
  token.sha256 = *sha256.Digest();
  token.scopes[static_cast<size_t>(Scope::kScore)] = true;
  return token;
}

class AccessProcessorTest : public ::testing::Test {
 protected:
  AccessProcessorTest()
      : access_(std::make_shared<AccessList>(
            std::vector<AccessEntry>{Token("a", "secret-a"), Token("b", "secret-b")},
            [this] { return now_; })),
        server_(OptionsWith(access_)) {}

  static GrpcServer::Options OptionsWith(std::shared_ptr<const AccessList> access) {
    GrpcServer::Options options = TestServerOptions();
    options.access = std::move(access);
    return options;
  }

  /// Calls Score on the one connection that all calls of a test share.
  grpc::Status Score(const std::string& token, const std::string& client_id = "") {
    grpc::ClientContext context;
    if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
    if (!client_id.empty()) context.AddMetadata("client_id", client_id);
    v1::ScoreResponse response;
    return server_.stub->Score(&context, ValidRequest(), &response);
  }

  absl::Time now_ = absl::FromUnixSeconds(1'800'000'000);  // changed between calls only
  std::shared_ptr<AccessList> access_;
  TransportServer server_;
};

TEST_F(AccessProcessorTest, ACallHasTheShareAndThePriorityOfItsEntry) {
  AccessEntry token = Token("a", "secret-a");
  token.share = 0.25;
  token.priority_max = Priority::kNormal;
  access_->Set({token, Token("b", "secret-b")});

  ASSERT_TRUE(Score("secret-a").ok());
  EXPECT_EQ(server_.head->last_request().client_share, 0.25);
  ASSERT_TRUE(Score("secret-b").ok());
  EXPECT_EQ(server_.head->last_request().client_share, 0);

  for (const auto& [secret, code] : {std::pair{"secret-a", grpc::StatusCode::PERMISSION_DENIED},
                                     std::pair{"secret-b", grpc::StatusCode::OK}}) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", std::string("Bearer ") + secret);
    v1::ScoreRequest request = ValidRequest();
    request.set_priority(v1::PRIORITY_HIGH);
    v1::ScoreResponse response;
    EXPECT_EQ(server_.stub->Score(&context, request, &response).error_code(), code) << secret;
  }
}

TEST_F(AccessProcessorTest, EveryListenerChecksItsCallers) {
  const TempFolder folder;
  GrpcServer::Options options = OptionsWith(access_);
  options.unix_socket = folder.path("socket");
  options.admin = "unix:" + folder.path("admin");
  const TransportServer server(options);
  for (const std::string& address :
       {server.address(), "unix:" + options.unix_socket, options.admin}) {
    const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    for (const auto& [token, code] :
         {std::pair{"secret-a", grpc::StatusCode::UNIMPLEMENTED},  // any entry will do
          std::pair{"secret-x", grpc::StatusCode::UNAUTHENTICATED}}) {
      grpc::ClientContext context;
      context.AddMetadata("authorization", std::string("Bearer ") + token);
      grpc::ByteBuffer answer;
      EXPECT_EQ(CallRaw(channel, "/unknown/Method", BufferOf("x"), answer, context).error_code(),
                code)
          << address << " " << token;
    }
  }
}

// Regression: all calls of a connection counted for the caller of its first call.
TEST_F(AccessProcessorTest, EachCallOfAConnectionCountsForItsOwnCaller) {
  for (const char* const name : {"a", "b", "a"}) {
    const grpc::Status status = Score(std::string("secret-") + name);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(server_.head->last_request().client_id, std::string("tenant-of-") + name);
  }
}

TEST_F(AccessProcessorTest, AClientIdOnlyDividesItsTenant) {
  ASSERT_TRUE(Score("secret-a", "trainer 7").ok());
  EXPECT_EQ(server_.head->last_request().client_id, "tenant-of-a");
  EXPECT_EQ(server_.head->last_request().sub_client_id, "trainer_7");

  ASSERT_TRUE(Score("secret-a").ok());
  EXPECT_EQ(server_.head->last_request().client_id, "tenant-of-a");
  EXPECT_EQ(server_.head->last_request().sub_client_id, "ipv4:127.0.0.1");
}

TEST_F(AccessProcessorTest, ARemovedTokenIsRefusedAtTheNextCallOfItsConnection) {
  ASSERT_TRUE(Score("secret-a").ok());

  access_->Set({Token("b", "secret-b")});

  EXPECT_EQ(Score("secret-a").error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(Score("secret-b").ok());
}

TEST_F(AccessProcessorTest, ACallWithoutATokenIsRefusedAfterOneWithAToken) {
  ASSERT_TRUE(Score("secret-a").ok());

  const grpc::Status status = Score("");

  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(status.error_message(), HasSubstr("needs a token"));
}

// Regression: the time was that of absl::Now() whatever clock the list had.
TEST_F(AccessProcessorTest, ATokenEndsAtItsTimeOnTheClockOfTheList) {
  AccessEntry token = Token("a", "secret-a");
  token.not_after = now_ + absl::Hours(1);
  access_->Set({token});
  EXPECT_TRUE(Score("secret-a").ok());

  now_ += absl::Hours(1);

  const grpc::Status status = Score("secret-a");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(status.error_message(), HasSubstr("token \"a\" expired at "));
}

TEST_F(AccessProcessorTest, TheLineAboutARefusalHasTheMethodAndTheKnownToken) {
  AccessEntry token = Token("a", "secret-a");
  token.scopes = {};
  access_->Set({token});

  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Score("secret-a").error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Score("secret-x").error_code(), grpc::StatusCode::UNAUTHENTICATED);

  const std::string log = ::testing::internal::GetCapturedStderr();
  constexpr char kBegin[] = "a call was refused method=/logprobd.v1.Scoring/Score token=";
  EXPECT_THAT(log, HasSubstr(absl::StrCat(kBegin, "a certificate=none reason=")));
  EXPECT_THAT(log, HasSubstr(absl::StrCat(kBegin, "none certificate=none reason=")));
}

/// Calls of any method, without a server.
class AccessProcessorMethodTest : public ::testing::Test {
 protected:
  /// Returns the code of a call with the token "t", or with none if `scope` is empty.
  grpc::StatusCode CodeOf(const std::string& path, std::optional<Scope> scope) {
    AccessEntry token = Token("t", "secret-t");
    token.scopes = {};
    if (scope.has_value()) {
      token.scopes[static_cast<size_t>(*scope)] = true;
    }
    access_->Set({token});
    std::multimap<grpc::string_ref, grpc::string_ref> metadata = {{":path", path}};
    if (scope.has_value()) {
      metadata.emplace("authorization", "Bearer secret-t");
    }
    return processor_.Process(metadata, nullptr, nullptr, nullptr).error_code();
  }

  Metrics metrics_{Metrics::Options()};
  const std::shared_ptr<AccessList> access_ =
      std::make_shared<AccessList>(std::vector<AccessEntry>());
  AccessProcessor processor_{access_, metrics_};
};

TEST_F(AccessProcessorMethodTest, EachMethodNeedsItsOwnScope) {
  for (const auto& [path, needed] : std::vector<std::pair<std::string, Scope>>{
           {"/logprobd.v1.Scoring/Score", Scope::kScore},
           {"/logprobd.v1.Scoring/ScoreStream", Scope::kScore},
           {"/logprobd.v1.Scoring/ListHeads", Scope::kScore},
           {"/logprobd.v1.Scoring/Verify", Scope::kVerify},
           {"/logprobd.v1.Weights/List", Scope::kAdmin},
           {"/logprobd.v1.Weights/Load", Scope::kAdmin},
           {"/logprobd.v1.Weights/Push", Scope::kAdmin}}) {
    for (const Scope scope : {Scope::kScore, Scope::kVerify, Scope::kAdmin, Scope::kMetrics}) {
      EXPECT_EQ(CodeOf(path, scope),
                scope == needed ? grpc::StatusCode::OK : grpc::StatusCode::PERMISSION_DENIED)
          << path << " " << ScopeName(scope);
    }
    EXPECT_EQ(CodeOf(path, std::nullopt), grpc::StatusCode::UNAUTHENTICATED) << path;
  }
}

TEST_F(AccessProcessorMethodTest, OnlyHealthNeedsNoToken) {
  EXPECT_EQ(CodeOf("/grpc.health.v1.Health/Check", std::nullopt), grpc::StatusCode::OK);
  EXPECT_EQ(CodeOf("/grpc.health.v1.Health/Watch", std::nullopt), grpc::StatusCode::OK);
  for (const char* const path :
       {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.health.v1.HealthOfAnother/Check", "/grpc.health.v1.Health/List", "/unknown", ""}) {
    EXPECT_EQ(CodeOf(path, std::nullopt), grpc::StatusCode::UNAUTHENTICATED) << path;
    EXPECT_EQ(CodeOf(path, Scope::kMetrics), grpc::StatusCode::OK) << path;
  }
}

/// The context of a connection with these properties.
class FakeAuthContext final : public grpc::AuthContext {
 public:
  explicit FakeAuthContext(std::multimap<std::string, std::string> properties)
      : properties_(std::move(properties)) {}

  std::vector<grpc::string_ref> FindPropertyValues(const std::string& name) const override {
    std::vector<grpc::string_ref> values;
    const auto [begin, end] = properties_.equal_range(name);
    for (auto property = begin; property != end; ++property) {
      values.emplace_back(property->second.data(), property->second.size());
    }
    return values;
  }

  bool IsPeerAuthenticated() const override { return true; }
  std::vector<grpc::string_ref> GetPeerIdentity() const override { return {}; }
  std::string GetPeerIdentityPropertyName() const override { return ""; }
  grpc::AuthPropertyIterator begin() const override { return end(); }
  grpc::AuthPropertyIterator end() const override { std::abort(); }
  void AddProperty(const std::string& /*key*/, const grpc::string_ref& /*value*/) override {
    ADD_FAILURE() << "the context belongs to all calls of the connection";
  }
  bool SetPeerIdentityPropertyName(const std::string& /*name*/) override { return false; }

 private:
  const std::multimap<std::string, std::string> properties_;
};

TEST(CredentialsOfTest, TheNamesOfACertificateAreItsDnsNamesAndUris) {
  const FakeAuthContext context({{GRPC_X509_CN_PROPERTY_NAME, "common"},
                                 {GRPC_X509_SAN_PROPERTY_NAME, "spiffe://x/y"},
                                 {GRPC_X509_SAN_PROPERTY_NAME, "a.example"},
                                 {GRPC_X509_SAN_PROPERTY_NAME, "mail@example"},
                                 {GRPC_PEER_URI_PROPERTY_NAME, "spiffe://x/y"},
                                 {GRPC_PEER_EMAIL_PROPERTY_NAME, "mail@example"},
                                 {GRPC_PEER_DNS_PROPERTY_NAME, "a.example"},
                                 {GRPC_PEER_DNS_PROPERTY_NAME, "b.example"}});

  EXPECT_THAT(CredentialsOf({}, &context).certificate_names,
              ElementsAre("a.example", "b.example", "spiffe://x/y"));
}

// Regression: it counted beside mail and IP addresses.
TEST(CredentialsOfTest, TheCommonNameCountsOnlyWithoutAlternativeNamesOfAnyKind) {
  const auto names_beside = [](std::multimap<std::string, std::string> properties) {
    properties.emplace(GRPC_X509_CN_PROPERTY_NAME, "common");
    const FakeAuthContext context(std::move(properties));
    const Credentials caller = CredentialsOf({}, &context);
    return std::vector<std::string>(caller.certificate_names.begin(),
                                    caller.certificate_names.end());
  };

  EXPECT_THAT(names_beside({}), ElementsAre("common"));
  EXPECT_THAT(names_beside({{GRPC_X509_SAN_PROPERTY_NAME, "spiffe://x/y"},
                            {GRPC_PEER_URI_PROPERTY_NAME, "spiffe://x/y"}}),
              ElementsAre("spiffe://x/y"));
  EXPECT_THAT(names_beside({{GRPC_X509_SAN_PROPERTY_NAME, "10.0.0.1"},
                            {GRPC_PEER_IP_PROPERTY_NAME, "10.0.0.1"}}),
              IsEmpty());
  EXPECT_THAT(names_beside({{GRPC_X509_SAN_PROPERTY_NAME, "mail@example"},
                            {GRPC_PEER_EMAIL_PROPERTY_NAME, "mail@example"}}),
              IsEmpty());
  EXPECT_THAT(names_beside({{GRPC_X509_SAN_PROPERTY_NAME, "other types of SAN"}}), IsEmpty());
}

TEST(CredentialsOfTest, ACallWithoutACertificateShowsItsAuthorizationOnly) {
  const Credentials caller = CredentialsOf({{"authorization", "Bearer x"}}, nullptr);

  EXPECT_EQ(caller.authorization, "Bearer x");
  EXPECT_THAT(caller.certificate_names, IsEmpty());
  EXPECT_EQ(CredentialsOf({}, nullptr).authorization, std::nullopt);
  EXPECT_EQ(CredentialsOf({{"authorization", ""}}, nullptr).authorization, "");
}

}  // namespace
}  // namespace logprobd::testing
