#include "server/app/run/http_access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace logprobd {
namespace {

using ::testing::HasSubstr;

const absl::Time kEnd = absl::FromUnixSeconds(1'800'003'600);

AccessEntry TokenWith(const std::string& id, Scope scope) {
  Sha256 sha256;
  const std::string text = absl::StrCat("secret:", id);
  sha256.Add({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  AccessEntry token;
  token.id = id;
  token.sha256 = *sha256.Digest();
  token.scopes[static_cast<size_t>(scope)] = true;
  token.not_after = kEnd;
  return token;
}

class HttpAccessTest : public ::testing::Test {
 protected:
  absl::StatusCode CodeOf(const std::string& authorization) {
    return access_.Check("/metrics", authorization, "ipv4:127.0.0.1:5").code();
  }
  static std::string Basic(const std::string& pair) {
    return absl::StrCat("Basic ", absl::Base64Escape(pair));
  }

  absl::Time now_ = absl::FromUnixSeconds(1'800'000'000);
  Metrics metrics_{Metrics::Options()};
  HttpAccess access_{
      std::make_shared<AccessList>(std::vector<AccessEntry>{TokenWith("scraper", Scope::kMetrics),
                                                            TokenWith("trainer", Scope::kScore)},
                                   [this] { return now_; }),
      metrics_};
};

TEST_F(HttpAccessTest, TakesATokenOrATokenAsThePasswordOfAnyUser) {
  for (const std::string& good :
       {std::string("Bearer secret:scraper"), std::string("bearer secret:scraper"),
        Basic("prometheus:secret:scraper"), Basic(":secret:scraper"),
        absl::StrCat("bAsIc ", absl::Base64Escape("x:secret:scraper"))}) {
    EXPECT_EQ(CodeOf(good), absl::StatusCode::kOk) << good;
  }
}

TEST_F(HttpAccessTest, RefusesEverythingElseAndCountsIt) {
  const std::vector<std::string> wrong = {"",
                                          "secret:scraper",
                                          "Basic",
                                          "Basic ",
                                          "Basic !",
                                          "Basic secret:scraper",
                                          Basic("scraper"),
                                          Basic("secret:scraper"),
                                          Basic("secret:scraper:"),
                                          Basic("x:Bearer secret:scraper"),
                                          Basic(absl::StrCat("x:", std::string(513, 'x'))),
                                          "Digest secret:scraper"};
  for (const std::string& each : wrong) {
    EXPECT_EQ(CodeOf(each), absl::StatusCode::kUnauthenticated) << each;
  }

  EXPECT_THAT(metrics_.Serialize(),
              HasSubstr(absl::StrCat("logprobd_rejected_total{reason=\"unauthenticated\"} ",
                                     wrong.size(), "\n")));
}

// Regression: the time was that of absl::Now() whatever clock the list had.
TEST_F(HttpAccessTest, ATokenEndsAtItsTimeOnTheClockOfTheList) {
  EXPECT_EQ(CodeOf("Bearer secret:scraper"), absl::StatusCode::kOk);

  now_ = kEnd;

  EXPECT_EQ(CodeOf("Bearer secret:scraper"), absl::StatusCode::kUnauthenticated);
}

TEST_F(HttpAccessTest, TheLineAboutARefusalHasTheKnownTokenAndThePeer) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(CodeOf("Bearer secret:trainer"), absl::StatusCode::kPermissionDenied);

  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("a call was refused method=/metrics token=trainer certificate=none "
                        "peer=ipv4:127.0.0.1:5 reason="));
}

TEST_F(HttpAccessTest, ATokenForScoresHasNoPages) {
  EXPECT_EQ(CodeOf("Bearer secret:trainer"), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(CodeOf(Basic("x:secret:trainer")), absl::StatusCode::kPermissionDenied);

  EXPECT_THAT(metrics_.Serialize(),
              HasSubstr("logprobd_rejected_total{reason=\"permission_denied\"} 2\n"));
}

}  // namespace
}  // namespace logprobd
