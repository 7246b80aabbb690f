#include <unistd.h>

#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/app/options/token_file.h"

namespace logprobd::client {
namespace {

struct Outcome {
  int exit_code = 0;
  std::string out;
  std::string err;
};

Outcome RunTokenNew(const std::vector<std::string>& options) {
  std::vector<std::string> arguments = {"token", "new"};
  arguments.insert(arguments.end(), options.begin(), options.end());
  std::ostringstream out;
  std::ostringstream err;
  const int exit_code = RunCli(arguments, {.out = out, .err = err});
  return {.exit_code = exit_code, .out = out.str(), .err = err.str()};
}

/// Returns the tokens of a server whose file has this text.
absl::StatusOr<std::vector<AccessToken>> ReadAsFile(const std::string& text) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/new_tokens_", getpid(), ".toml");
  std::ofstream(path) << text;
  return ReadTokenFile(path);
}

TEST(TokenCommandTest, TheServerAcceptsTheTokenThroughItsEntry) {
  const Outcome outcome =
      RunTokenNew({"trainer-7", "--tenant", "team-a", "--scopes", "score,verify", "--days", "2",
                   "--share", "0.5", "--priority-max", "low"});
  ASSERT_EQ(outcome.exit_code, kExitOk) << outcome.err;
  std::smatch token;
  ASSERT_TRUE(std::regex_search(outcome.err, token, std::regex("token ([A-Za-z0-9_-]{43})\n")));
  EXPECT_EQ(outcome.out.find(token[1]), std::string::npos) << "the secret is in the entry";

  const auto tokens = ReadAsFile(outcome.out);

  ASSERT_TRUE(tokens.ok()) << tokens.status();
  const AccessTokens server(*tokens);
  const absl::Time now = absl::Now();
  const std::string authorization = "Bearer " + token[1].str();
  EXPECT_TRUE(server.Check(authorization, Scope::kScore, now).ok());
  EXPECT_TRUE(server.Check(authorization, Scope::kVerify, now + absl::Hours(47)).ok());
  EXPECT_FALSE(server.Check(authorization, Scope::kVerify, now + absl::Hours(49)).ok());
  EXPECT_FALSE(server.Check(authorization, Scope::kAdmin, now).ok());
  EXPECT_EQ(tokens->front().tenant, "team-a");
  EXPECT_EQ(tokens->front().share, 0.5);
  EXPECT_EQ(tokens->front().priority_max, logprobd::Priority::kLow);
}

TEST(TokenCommandTest, EveryTokenIsNew) {
  const auto first = nlohmann::json::parse(RunTokenNew({"a", "--json"}).out);
  const auto second = nlohmann::json::parse(RunTokenNew({"a", "--json"}).out);

  EXPECT_NE(first["token"], second["token"]);
  EXPECT_TRUE(ReadAsFile(first["entry"]).ok());
}

TEST(TokenCommandTest, RefusesWhatTheServerWouldRefuse) {
  for (const std::vector<std::string>& options :
       std::vector<std::vector<std::string>>{{},
                                             {"a b"},
                                             {std::string(65, 'a')},
                                             {"a", "--scopes", "root"},
                                             {"a", "--share", "1.5"},
                                             {"a", "--days", "0"},
                                             {"a", "--priority-max", "top"},
                                             {"a", "--tenant", "x\""}}) {
    EXPECT_EQ(RunTokenNew(options).exit_code, kExitUsage);
  }
}

}  // namespace
}  // namespace logprobd::client
