#include "server/app/options/token_file.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kDigest(64, 'a');
const std::string kToken =
    absl::StrCat("[[token]]\nid = \"t\"\nsha256 = \"", kDigest, "\"\nscopes = [\"score\"]\n");

const std::string kCertificate = "[[certificate]]\nname = \"c.example\"\nscopes = [\"score\"]\n";

class TokenFileTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::vector<AccessEntry>> Read(const std::string& text) {
    return ReadTokenFile(folder_.Write("tokens.toml", text));
  }

  void ExpectRefused(const std::string& text, const std::string& problem) {
    const auto tokens = Read(text);
    EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(tokens.status().message(), HasSubstr(problem)) << text;
  }

  const testing::TempFolder folder_;
};

TEST_F(TokenFileTest, ReadsAllKeys) {
  const auto tokens = Read(absl::StrCat(
      "[[token]]\nid = \"trainer-7\"\nsha256 = \"", std::string(62, '0'), "Ff\"\n",
      "tenant = \"team-a\"\nscopes = [\"verify\", \"admin\", \"metrics\"]\n",
      "not_after = 2027-01-31T02:00:00+02:00\nshare = 0.25\npriority_max = \"low\"\n", kToken));

  ASSERT_TRUE(tokens.ok()) << tokens.status();
  ASSERT_EQ(tokens->size(), 2U);
  const AccessEntry& token = tokens->front();
  EXPECT_EQ(token.id, "trainer-7");
  EXPECT_EQ(token.tenant, "team-a");
  ASSERT_TRUE(token.is_token());
  EXPECT_EQ(token.sha256->back(), 0xFF);
  EXPECT_THAT(token.scopes, ElementsAre(false, true, true, true));
  EXPECT_EQ(token.not_after, absl::FromCivil(absl::CivilDay(2027, 1, 31), absl::UTCTimeZone()));
  EXPECT_EQ(token.share, 0.25);
  EXPECT_EQ(token.priority_max, Priority::kLow);
}

TEST_F(TokenFileTest, ReadsTimesOfFarYears) {
  const auto tokens = Read(absl::StrCat(kToken, "not_after = 9999-12-31T23:59:59.5-01:30\n"));

  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->front().not_after,
            absl::FromCivil(absl::CivilSecond(10000, 1, 1, 1, 29, 59), absl::UTCTimeZone()) +
                absl::Milliseconds(500));
}

TEST_F(TokenFileTest, RefusesTextThatIsNotUtf8) {
  ExpectRefused("a = ['''x\xF4''', {y = 1}]\n", "is not UTF-8");
  ExpectRefused("a = '''x\x01'''\n", "contains a control character");
}

// Regression: toml11 used up the stack, and SIGHUP ended the server.
TEST_F(TokenFileTest, RefusesArraysThatAreNestedDeeply) {
  constexpr char kRefusal[] = "more than 32 deep";
  ExpectRefused("a = " + std::string(100'000, '[') + "\n", kRefusal);
  // Brackets in strings and comments close nothing.
  for (const char* const text : {"[ ']', ", "[ \"]\\\"]\", ", "[ '''\n]''''', ", "[ # ]\n"}) {
    std::string nested = "a = ";
    for (int i = 0; i < 33; ++i) {
      nested += text;
    }
    ExpectRefused(nested, kRefusal);
  }
}

TEST_F(TokenFileTest, AcceptsManyTablesAndBracketsInText) {
  std::string text = "# [[[[\n";
  text += kToken;
  for (int i = 0; i < 40; ++i) {
    text += "# '[\n";
  }
  const auto tokens = Read(text + "\n");
  EXPECT_TRUE(tokens.ok()) << tokens.status();
}

TEST_F(TokenFileTest, OptionalKeysHaveDefaults) {
  const auto tokens = Read(kToken);

  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->front().tenant, "t");
  EXPECT_THAT(tokens->front().scopes, ElementsAre(true, false, false, false));
  EXPECT_EQ(tokens->front().not_after, absl::InfiniteFuture());
  EXPECT_EQ(tokens->front().share, 0);
  EXPECT_EQ(tokens->front().priority_max, Priority::kHigh);
}

TEST_F(TokenFileTest, NamesTheTokenAndTheKeyThatAreWrong) {
  for (const auto& [key, problem] : std::vector<std::pair<std::string, std::string>>{
           {"id = \"\"", "token 1: id: must be 1 to 64"},
           {"id = 3", "token 1: id: must be a string"},
           {"id = \"a b\"", "token 1: id: must be 1 to 64"},
           {absl::StrCat("id = \"", std::string(65, 'a'), "\""), "token 1: id: must be 1 to 64"},
           {"sha256 = \"ab\"", "sha256: must be 64"},
           {absl::StrCat("sha256 = \"", std::string(64, 'g'), "\""), "sha256: must be 64"},
           {"tenant = \"\"", "tenant: must be"},
           {"scopes = []", "scopes: must be an array"},
           {"scopes = \"score\"", "scopes: must be an array"},
           {"scopes = [\"score\", \"any\"]", "scopes: must be an array"},
           {"not_after = \"2027-01-01\"", "not_after: must be a time"},
           {"not_after = 2027-01-31T00:00:00", "not_after: must be a time"},
           {"share = 0", "share: must be a number in (0, 1]"},
           {"share = 1.01", "share: must be a number in (0, 1]"},
           {"share = \"1\"", "share: must be a number in (0, 1]"},
           {"priority_max = \"highest\"", "priority_max: must be"},
           {"token = \"secret\"", "token: is unknown; the keys are"}}) {
    std::string text = kToken;
    const std::string name = key.substr(0, key.find(' '));
    if (const size_t begin = text.find("\n" + name + " = "); begin != std::string::npos) {
      text.erase(begin + 1, text.find('\n', begin + 1) - begin);
    }
    ExpectRefused(absl::StrCat(text, key, "\n"), problem);
  }
  EXPECT_TRUE(Read(absl::StrCat(kToken, "share = 1\n")).ok());
}

TEST_F(TokenFileTest, ReadsCertificatesAfterTheTokens) {
  const auto entries = Read(
      absl::StrCat(kCertificate, kToken, "[[certificate]]\nname = \"spiffe://cluster/ns/a/sa/b\"\n",
                   "tenant = \"team-a\"\nscopes = [\"verify\", \"admin\"]\n",
                   "not_after = 2027-01-31T00:00:00Z\nshare = 0.5\npriority_max = \"normal\"\n"));

  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 3U);
  EXPECT_EQ((*entries)[0].id, "t");
  EXPECT_EQ((*entries)[1].id, "c.example");
  EXPECT_EQ((*entries)[1].tenant, "c.example");
  EXPECT_FALSE((*entries)[1].is_token());
  const AccessEntry& last = (*entries)[2];
  EXPECT_FALSE(last.is_token());
  EXPECT_EQ(last.id, "spiffe://cluster/ns/a/sa/b");
  EXPECT_EQ(last.tenant, "team-a");
  EXPECT_THAT(last.scopes, ElementsAre(false, true, true, false));
  EXPECT_EQ(last.not_after, absl::FromCivil(absl::CivilDay(2027, 1, 31), absl::UTCTimeZone()));
  EXPECT_EQ(last.share, 0.5);
  EXPECT_EQ(last.priority_max, Priority::kNormal);
}

TEST_F(TokenFileTest, ANameOfACertificateHas1To255Bytes) {
  const auto with_name = [](const std::string& name) {
    return absl::StrCat("[[certificate]]\nname = \"", name, "\"\nscopes = [\"score\"]\n");
  };
  EXPECT_TRUE(Read(with_name("a")).ok());
  EXPECT_TRUE(Read(with_name(std::string(255, 'a'))).ok());
  for (const std::string& name : {std::string(), std::string(256, 'a'), std::string("*.example"),
                                  std::string("Team A"), std::string("\xC3\xA9")}) {
    ExpectRefused(with_name(name), "certificate 1: name: must be 1 to 255 letters");
  }
}

TEST_F(TokenFileTest, NamesTheCertificateAndTheKeyThatAreWrong) {
  for (const auto& [key, problem] : std::vector<std::pair<std::string, std::string>>{
           {"id = \"c\"", "certificate 1: id: is unknown; the keys are name, tenant, "},
           {absl::StrCat("sha256 = \"", kDigest, "\""), "certificate 1: sha256: is unknown"},
           {"tenant = \"\"", "certificate 1: tenant: must be"},
           {"share = 2", "certificate 1: share: must be"},
           {"not_after = 1", "certificate 1: not_after: must be"}}) {
    ExpectRefused(absl::StrCat(kCertificate, key, "\n"), problem);
  }
  ExpectRefused("[[certificate]]\nname = \"c\"\n", "certificate 1: scopes: is missing");
  ExpectRefused("[[certificate]]\nscopes = [\"score\"]\n", "certificate 1: name: is missing");
  ExpectRefused(kToken + kCertificate + kCertificate,
                "certificate 2 has the name of another, c.example");
  ExpectRefused(kCertificate + "[[token]]\nid = 3\n", "token 1: id: must be a string");
  ExpectRefused("certificate = 3\n", "certificate is unknown");
}

// Regression: such an entry was accepted, and nobody could use it.
TEST_F(TokenFileTest, ACertificateCannotHaveTheScopeOfHttp) {
  for (const char* const scopes : {"\"metrics\"", "\"score\", \"metrics\""}) {
    ExpectRefused(absl::StrCat("[[certificate]]\nname = \"c\"\nscopes = [", scopes, "]\n"),
                  "certificate 1: scopes: \"metrics\" is for tokens only");
  }
}

TEST_F(TokenFileTest, CertificatesNeedAClientCa) {
  ServerOptions options;
  options.tokens = folder_.Write("tokens.toml", kCertificate);
  const auto refused = AccessEntriesOf(options);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("needs --tls-client-ca"));

  options.tls_client_ca = "ca.pem";
  EXPECT_TRUE(AccessEntriesOf(options).ok());

  options.tls_client_ca = "";
  ASSERT_TRUE(Read(kToken).ok());
  EXPECT_TRUE(AccessEntriesOf(options).ok());
}

TEST_F(TokenFileTest, RefusesWhatIsMissingOrRepeated) {
  for (const std::string key : {"id", "sha256", "scopes"}) {
    std::string text = kToken;
    const size_t begin = text.find("\n" + key);
    text.erase(begin, text.find('\n', begin + 1) - begin);
    ExpectRefused(text, absl::StrCat("token 1: ", key, ": is missing"));
  }
  ExpectRefused(kToken + kToken, "token 2 has the id of another, t");
  std::string other = kToken;
  other.replace(other.find("\"t\""), 3, "\"u\"");
  ExpectRefused(kToken + other, "token 2 has the sha256 of another, t");
  ExpectRefused("", "has no token");
  ExpectRefused("tokens = 3\n", "tokens is unknown");
  ExpectRefused("[[token", "file of tokens ");
  EXPECT_EQ(ReadTokenFile("/nowhere.toml").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace logprobd
