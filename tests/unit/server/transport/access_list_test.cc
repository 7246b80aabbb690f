#include "server/transport/access_list.h"

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

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const absl::Time kNow = absl::FromUnixSeconds(1'800'000'000);

AccessEntry Token(const std::string& id, const std::string& text) {
  Sha256 sha256;
  sha256.Add({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  AccessEntry token;
  token.id = token.tenant = id;
  token.sha256 = *sha256.Digest();
  return token;
}

AccessEntry Certificate(const std::string& name) {
  AccessEntry entry;
  entry.id = entry.tenant = name;
  return entry;
}

class AccessListTest : public ::testing::Test {
 protected:
  AccessListTest()
      : access_({Token("a", "secret-a"), Token("b", "secret-b")}, [this] { return now_; }) {}

  absl::StatusCode CodeOf(absl::string_view authorization, Scope scope = Scope::kAny) const {
    return access_.Check({.authorization = authorization}, scope).status().code();
  }

  absl::Status StatusOf(const Credentials& caller, Scope scope = Scope::kAny) const {
    return access_.Check(caller, scope).status();
  }

  std::string MessageOf(const Credentials& caller) const {
    return std::string(StatusOf(caller).message());
  }

  std::string IdOf(const Credentials& caller) const {
    const auto entry = access_.Identify(caller);
    return entry.ok() ? (*entry)->id : std::string(entry.status().message());
  }

  absl::Time now_ = kNow;
  AccessList access_;
};

TEST_F(AccessListTest, FindsTheTokenOfTheAuthorization) {
  EXPECT_EQ(IdOf({.authorization = "Bearer secret-a"}), "a");
  EXPECT_EQ(IdOf({.authorization = "bearer secret-b"}), "b");
}

TEST_F(AccessListTest, RefusesEverythingElse) {
  for (const std::string& wrong :
       {std::string(), std::string("Bearer"), std::string("Bearer "), std::string("Bearer secret"),
        std::string("Bearer secret-a "), std::string("Bearer  secret-a"), std::string("secret-a"),
        std::string("Basic secret-a"), "Bearer " + std::string(513, 'x')}) {
    EXPECT_EQ(CodeOf(wrong), absl::StatusCode::kUnauthenticated) << wrong;
  }
  // A token of the longest length is hashed and not known.
  const std::string longest = "Bearer " + std::string(512, 'x');
  EXPECT_THAT(MessageOf({.authorization = longest}), HasSubstr("does not know"));
}

TEST_F(AccessListTest, ATokenHasOnlyItsScopes) {
  for (const Scope scope : {Scope::kScore, Scope::kVerify, Scope::kAdmin, Scope::kMetrics}) {
    AccessEntry token = Token("a", "secret-a");
    token.scopes[static_cast<size_t>(scope)] = true;
    access_.Set({token});
    for (const Scope needed : {Scope::kScore, Scope::kVerify, Scope::kAdmin, Scope::kMetrics}) {
      EXPECT_EQ(CodeOf("Bearer secret-a", needed),
                needed == scope ? absl::StatusCode::kOk : absl::StatusCode::kPermissionDenied);
    }
    EXPECT_EQ(CodeOf("Bearer secret-a", Scope::kAny), absl::StatusCode::kOk);
  }
}

TEST_F(AccessListTest, ATokenEndsAtItsTime) {
  AccessEntry token = Token("a", "secret-a");
  token.not_after = kNow + absl::Nanoseconds(1);
  access_.Set({token});
  EXPECT_EQ(CodeOf("Bearer secret-a"), absl::StatusCode::kOk);

  now_ += absl::Nanoseconds(1);
  EXPECT_EQ(CodeOf("Bearer secret-a"), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(MessageOf({.authorization = "Bearer secret-a"}),
              HasSubstr("token \"a\" expired at "));
}

TEST_F(AccessListTest, ErrorsNeverRepeatTheToken) {
  EXPECT_THAT(MessageOf({.authorization = "Bearer secret-x"}), Not(HasSubstr("secret-x")));
}

TEST_F(AccessListTest, FindsACertificateByEachOfItsNamesByteByByte) {
  access_.Set({Token("a", "secret-a"), Certificate("x.example"), Certificate("spiffe://x/y")});

  EXPECT_EQ(IdOf({.certificate_names = {"x.example"}}), "x.example");
  EXPECT_EQ(IdOf({.certificate_names = {"w.example", "spiffe://x/y"}}), "spiffe://x/y");
  for (const absl::string_view other : {"X.example", "x.example.", "x.exampl", "a.x.example", "*",
                                        "", "a", "spiffe://x/y/", "spiffe://x"}) {
    EXPECT_THAT(IdOf({.certificate_names = {other}}), HasSubstr("needs a token")) << other;
  }
  EXPECT_THAT(IdOf({.certificate_names = {absl::string_view("x.example\0.evil", 15)}}),
              HasSubstr("x.example\\x00.evil"));
}

TEST_F(AccessListTest, ACertificateWithSeveralEntriesHasTheFirstOfTheList) {
  access_.Set({Certificate("first"), Certificate("second")});
  EXPECT_EQ(IdOf({.certificate_names = {"second", "first"}}), "first");
}

TEST_F(AccessListTest, ATokenCountsBeforeTheCertificateAlsoIfItIsWrong) {
  access_.Set({Token("a", "secret-a"), Certificate("x.example")});

  EXPECT_EQ(IdOf({.authorization = "Bearer secret-a", .certificate_names = {"x.example"}}), "a");
  // Regression: an empty authorization counted as none.
  for (const char* const wrong : {"Bearer secret-b", "Basic x", ""}) {
    EXPECT_EQ(StatusOf({.authorization = wrong, .certificate_names = {"x.example"}}).code(),
              absl::StatusCode::kUnauthenticated);
  }
}

TEST_F(AccessListTest, ACertificateWithoutAnEntryIsToldWhatIsMissing) {
  const Credentials caller{.certificate_names = {"x.example", "y.example"}};
  EXPECT_EQ(StatusOf(caller).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(MessageOf(caller),
              AllOf(HasSubstr("needs a token"), HasSubstr("[[certificate]] named \"x.example\""),
                    HasSubstr("logprobctl token certificate")));

  const std::string longest(255, 'n');
  EXPECT_THAT(MessageOf({.certificate_names = {longest}}), HasSubstr('"' + longest + '"'));
  EXPECT_THAT(MessageOf({.certificate_names = {longest + "m"}}), HasSubstr('"' + longest + '"'));
}

TEST_F(AccessListTest, TheEntryOfACertificateHasScopesAndAnEnd) {
  AccessEntry entry = Certificate("x.example");
  entry.scopes[static_cast<size_t>(Scope::kVerify)] = true;
  entry.not_after = kNow + absl::Nanoseconds(1);
  access_.Set({entry});
  const Credentials caller{.certificate_names = {"x.example"}};

  EXPECT_TRUE(StatusOf(caller, Scope::kVerify).ok());
  EXPECT_TRUE(StatusOf(caller, Scope::kAny).ok());
  EXPECT_EQ(
      StatusOf(caller, Scope::kScore),
      absl::PermissionDeniedError("the entry of certificate \"x.example\" lacks the scope score"));

  now_ += absl::Nanoseconds(1);
  EXPECT_EQ(StatusOf(caller, Scope::kVerify).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(MessageOf(caller), HasSubstr("the entry of certificate \"x.example\" expired at "));
}

TEST_F(AccessListTest, NamesACallerWhateverItMayDo) {
  AccessEntry expired = Token("a", "secret-a");
  expired.not_after = kNow;
  access_.Set({expired, Certificate("y.example")});
  const auto text_of = [&](const Credentials& caller, const AccessList* access) {
    const Caller named = CallerOf(caller, access, "unix:");
    EXPECT_EQ(named.peer, "unix:");
    return absl::StrCat(named.token, " ", named.certificate);
  };
  const Credentials by_token{.authorization = "Bearer secret-a", .certificate_names = {"x", "z"}};

  EXPECT_EQ(text_of(by_token, &access_), "a x");
  EXPECT_EQ(text_of(by_token, nullptr), "none x");
  EXPECT_EQ(text_of({.authorization = "Bearer b"}, &access_), "none none");
  EXPECT_EQ(text_of({.certificate_names = {"x", "y.example"}}, &access_), "none y.example");
  const std::string longest(255, 'n');
  EXPECT_EQ(text_of({.certificate_names = {longest + "m"}}, &access_), "none " + longest);
}

TEST_F(AccessListTest, AnEntryHasTheDefaultShareUnlessItsFileSaysMore) {
  EXPECT_EQ(AccessEntry().share, 0);
  EXPECT_EQ(AccessEntry().priority_max, Priority::kHigh);
  EXPECT_EQ(AccessEntry().not_after, absl::InfiniteFuture());
  for (const Scope scope : {Scope::kScore, Scope::kVerify, Scope::kAdmin, Scope::kMetrics}) {
    EXPECT_FALSE(AccessEntry().scopes[static_cast<size_t>(scope)]);
  }
}

TEST(AccessRefusalsTest, CountsEveryRefusalAndWritesTwentyLinesAtEveryLogLevel) {
  Metrics metrics{Metrics::Options()};
  AccessRefusals refusals(metrics);
  int num_callers = 0;
  const auto caller_of = [&]() -> Caller {
    ++num_callers;
    return {.token = "t", .certificate = "c.example", .peer = "ipv4:1.2.3.4:5"};
  };

  SetLogLevel(LogLevel::kError);
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 21; ++i) {
    refusals.Record("/metrics", caller_of, absl::UnauthenticatedError("no token"));
  }
  refusals.Record("/metrics", caller_of, absl::PermissionDeniedError("no scope"));
  const std::string log = ::testing::internal::GetCapturedStderr();
  SetLogLevel(LogLevel::kInfo);

  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 20);
  EXPECT_EQ(num_callers, 20);  // a flood of refused calls does not have its tokens hashed twice
  EXPECT_THAT(log, HasSubstr("a call was refused method=/metrics token=t certificate=c.example "
                             "peer=ipv4:1.2.3.4:5 reason=\"no token\" lines_suppressed=0\n"));
  const std::string text = metrics.Serialize();
  EXPECT_THAT(text, HasSubstr("logprobd_rejected_total{reason=\"unauthenticated\"} 21"));
  EXPECT_THAT(text, HasSubstr("logprobd_rejected_total{reason=\"permission_denied\"} 1"));
}

TEST_F(AccessListTest, SetReplacesAllEntriesWhileOthersCheck) {
  std::thread checks([&] {
    for (int i = 0; i < 2'000; ++i) {
      (void)CodeOf("Bearer secret-a");
      (void)IdOf({.authorization = "Bearer secret-a"});
    }
  });
  for (int i = 0; i < 200; ++i) {
    access_.Set({Token(absl::StrCat("t", i), absl::StrCat("secret", i))});
  }
  checks.join();

  EXPECT_EQ(CodeOf("Bearer secret-a"), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(IdOf({.authorization = "Bearer secret199"}), "t199");
}

}  // namespace
}  // namespace logprobd
