#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/app/options/token_file.h"
#include "tests/support/temp_folder.h"

namespace logprobd::client {
namespace {

struct Outcome {
  int exit_code = 0;
  std::string out;
  std::string err;
};

Outcome RunToken(const std::string& command, const std::vector<std::string>& options) {
  std::vector<std::string> arguments = {"token", command};
  arguments.insert(arguments.end(), options.begin(), options.end());
  std::ostringstream out;
  std::ostringstream err;
  const int exit_code = RunCli(arguments, {.out = out, .err = err});
  return {.exit_code = exit_code, .out = out.str(), .err = err.str()};
}

/// Returns the tokens of a server whose file has this text.
absl::StatusOr<std::vector<AccessEntry>> ReadAsFile(const std::string& text) {
  const testing::TempFolder folder;
  return ReadTokenFile(folder.Write("tokens.toml", text));
}

TEST(TokenCommandTest, TheServerAcceptsTheTokenThroughItsEntry) {
  const Outcome outcome =
      RunToken("new", {"trainer-7", "--tenant", "team-a", "--scopes", "score,verify", "--days", "2",
                       "--share", "0.5", "--priority-max", "low"});
  ASSERT_EQ(outcome.exit_code, kExitOk) << outcome.err;
  std::smatch token;
  ASSERT_TRUE(std::regex_search(outcome.err, token, std::regex("token ([A-Za-z0-9_-]{43})\n")));
  EXPECT_EQ(outcome.out.find(token[1]), std::string::npos) << "the secret is in the entry";

  const auto tokens = ReadAsFile(outcome.out);

  ASSERT_TRUE(tokens.ok()) << tokens.status();
  absl::Time now = absl::Now();
  const AccessList server(*tokens, [&now] { return now; });
  const std::string authorization = "Bearer " + token[1].str();
  const Credentials caller{.authorization = authorization};
  EXPECT_TRUE(server.Check(caller, Scope::kScore).ok());
  EXPECT_FALSE(server.Check(caller, Scope::kAdmin).ok());
  now += absl::Hours(47);
  EXPECT_TRUE(server.Check(caller, Scope::kVerify).ok());
  now += absl::Hours(2);
  EXPECT_FALSE(server.Check(caller, Scope::kVerify).ok());
  EXPECT_EQ(tokens->front().tenant, "team-a");
  EXPECT_EQ(tokens->front().share, 0.5);
  EXPECT_EQ(tokens->front().priority_max, logprobd::Priority::kLow);
}

TEST(TokenCommandTest, TheServerAcceptsACertificateThroughItsEntry) {
  const std::string name = "spiffe://cluster/" + std::string(238, 'a');  // 255 bytes
  const Outcome outcome =
      RunToken("certificate", {name, "--tenant", "team-a", "--scopes", "admin", "--days", "2"});
  ASSERT_EQ(outcome.exit_code, kExitOk) << outcome.err;

  const auto entries = ReadAsFile(outcome.out);

  ASSERT_TRUE(entries.ok()) << entries.status();
  absl::Time now = absl::Now() + absl::Hours(47);
  const AccessList server(*entries, [&now] { return now; });
  const Credentials caller{.certificate_names = {name}};
  EXPECT_TRUE(server.Check(caller, Scope::kAdmin).ok());
  EXPECT_FALSE(server.Check(caller, Scope::kScore).ok());
  now += absl::Hours(2);
  EXPECT_FALSE(server.Check(caller, Scope::kAdmin).ok());
  EXPECT_EQ(entries->front().tenant, "team-a");
  const auto json = nlohmann::json::parse(RunToken("certificate", {name, "--json"}).out);
  EXPECT_TRUE(ReadAsFile(json["entry"]).ok());
  EXPECT_EQ(RunToken("certificate", {name + "a"}).exit_code, kExitUsage);
  EXPECT_EQ(RunToken("certificate", {"*.example"}).exit_code, kExitUsage);
  EXPECT_EQ(RunToken("certificate", {name, "--scopes", "score,metrics"}).exit_code, kExitUsage);
}

TEST(TokenCommandTest, EveryTokenIsNew) {
  const auto first = nlohmann::json::parse(RunToken("new", {"a", "--json"}).out);
  const auto second = nlohmann::json::parse(RunToken("new", {"a", "--json"}).out);

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
    EXPECT_EQ(RunToken("new", options).exit_code, kExitUsage);
  }
}

}  // namespace
}  // namespace logprobd::client
