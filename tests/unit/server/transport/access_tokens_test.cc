#include "server/transport/access_tokens.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd {
namespace {

using ::testing::HasSubstr;

const absl::Time kNow = absl::FromUnixSeconds(1'800'000'000);

AccessToken Token(const std::string& id, const std::string& text) {
  Sha256 sha256;
  sha256.Add({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  AccessToken token;
  token.id = token.tenant = id;
  token.sha256 = *sha256.Digest();
  return token;
}

class AccessTokensTest : public ::testing::Test {
 protected:
  AccessTokensTest() : tokens_({Token("a", "secret-a"), Token("b", "secret-b")}) {}

  absl::StatusCode CodeOf(absl::string_view authorization, Scope scope = Scope::kAny) const {
    return tokens_.Check(authorization, scope, kNow).status().code();
  }

  AccessTokens tokens_;
};

TEST_F(AccessTokensTest, FindsTheTokenOfTheAuthorization) {
  EXPECT_EQ((*tokens_.Check("Bearer secret-a", Scope::kAny, kNow))->id, "a");
  EXPECT_EQ((*tokens_.Check("bearer secret-b", Scope::kAny, kNow))->id, "b");
}

TEST_F(AccessTokensTest, RefusesEverythingElse) {
  for (const std::string& wrong :
       {std::string(), std::string("Bearer"), std::string("Bearer "), std::string("Bearer secret"),
        std::string("Bearer secret-a "), std::string("Bearer  secret-a"), std::string("secret-a"),
        std::string("Basic secret-a"), "Bearer " + std::string(513, 'x')}) {
    EXPECT_EQ(CodeOf(wrong), absl::StatusCode::kUnauthenticated) << wrong;
  }
  // A token of the longest length is hashed and not known.
  EXPECT_THAT(
      tokens_.Check("Bearer " + std::string(512, 'x'), Scope::kAny, kNow).status().message(),
      HasSubstr("does not know"));
}

TEST_F(AccessTokensTest, ATokenHasOnlyItsScopes) {
  for (const Scope scope : {Scope::kScore, Scope::kVerify, Scope::kAdmin, Scope::kMetrics}) {
    AccessToken token = Token("a", "secret-a");
    token.scopes[static_cast<size_t>(scope)] = true;
    tokens_.Set({token});
    for (const Scope needed : {Scope::kScore, Scope::kVerify, Scope::kAdmin, Scope::kMetrics}) {
      EXPECT_EQ(CodeOf("Bearer secret-a", needed),
                needed == scope ? absl::StatusCode::kOk : absl::StatusCode::kPermissionDenied);
    }
    EXPECT_EQ(CodeOf("Bearer secret-a", Scope::kAny), absl::StatusCode::kOk);
  }
}

TEST_F(AccessTokensTest, ATokenEndsAtItsTime) {
  AccessToken token = Token("a", "secret-a");
  token.not_after = kNow + absl::Nanoseconds(1);
  tokens_.Set({token});
  EXPECT_EQ(CodeOf("Bearer secret-a"), absl::StatusCode::kOk);

  token.not_after = kNow;
  tokens_.Set({token});
  const absl::Status expired = tokens_.Check("Bearer secret-a", Scope::kAny, kNow).status();
  EXPECT_EQ(expired.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(expired.message(), HasSubstr("token \"a\" expired at "));
}

TEST_F(AccessTokensTest, ErrorsNeverRepeatTheToken) {
  EXPECT_THAT(tokens_.Check("Bearer secret-x", Scope::kAny, kNow).status().message(),
              ::testing::Not(HasSubstr("secret-x")));
}

TEST(TokenRefusalsTest, CountsEveryRefusalAndLogsTwentyLines) {
  Metrics metrics{Metrics::Options()};
  TokenRefusals refusals(metrics);

  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 21; ++i) {
    refusals.Record("/metrics", absl::UnauthenticatedError("no token"));
  }
  refusals.Record("/metrics", absl::PermissionDeniedError("no scope"));
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 20);
  EXPECT_THAT(log, HasSubstr("a call was refused method=/metrics"));
  const std::string text = metrics.Serialize();
  EXPECT_THAT(text, HasSubstr("logprobd_rejected_total{reason=\"unauthenticated\"} 21"));
  EXPECT_THAT(text, HasSubstr("logprobd_rejected_total{reason=\"permission_denied\"} 1"));
}

TEST_F(AccessTokensTest, SetReplacesAllTokensWhileOthersCheck) {
  std::thread checks([&] {
    for (int i = 0; i < 2'000; ++i) {
      (void)CodeOf("Bearer secret-a");
      (void)tokens_.Find("a");
    }
  });
  for (int i = 0; i < 200; ++i) {
    tokens_.Set({Token(absl::StrCat("t", i), absl::StrCat("secret", i))});
  }
  checks.join();

  EXPECT_EQ(CodeOf("Bearer secret-a"), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(tokens_.Find("a"), nullptr);
  EXPECT_EQ(tokens_.Find("t199")->tenant, "t199");
}

}  // namespace
}  // namespace logprobd
