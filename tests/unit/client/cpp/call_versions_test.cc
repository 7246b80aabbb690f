#include "client/cpp/call_versions.h"

#include <string>
#include <vector>

#include "client/cpp/policy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CallVersionsTest : public ::testing::Test {
 protected:
  CallVersionsTest()
      : balance_({.now = [] { return absl::UnixEpoch(); }, .unit_random = [] { return 0.0; }},
                 {"a", "b"}) {
    for (const std::string& address : balance_.TakeDueChecks(Balance::Due::kAll)) {
      balance_.Checked(address, ServerInfo{.heads = {{.name = "h", .weights_version = 1}}},
                       absl::UnixEpoch());
    }
  }

  static bool Keeps(CallVersions& versions, const std::string& address, uint64_t version,
                    int epoch) {
    const absl::StatusOr<bool> keeps = versions.Keeps(address, version, epoch);
    EXPECT_TRUE(keeps.ok()) << keeps.status();
    return keeps.value_or(false);
  }

  Balance balance_;
};

TEST_F(CallVersionsTest, KeepsTheFirstVersionSeen) {
  CallVersions versions(balance_, {});

  EXPECT_TRUE(Keeps(versions, "a", 1, 0));
  EXPECT_FALSE(Keeps(versions, "b", 2, 0));

  EXPECT_EQ(versions.kept(), 1U);
  EXPECT_EQ(versions.preference().version, 1U);
  EXPECT_THAT(versions.preference().excluded, ElementsAre("b"));
}

TEST_F(CallVersionsTest, KeepsToTheVersionOfTheFirstServerAsked) {
  CallVersions versions(balance_, {.head = "h"});

  versions.Asked({.address = "a", .version = 4});
  versions.Asked({.address = "b", .version = 5});

  EXPECT_EQ(versions.preference().head, "h");
  EXPECT_EQ(versions.preference().version, 4U);
  EXPECT_TRUE(Keeps(versions, "b", 6, 0));  // the expected version is not binding
  EXPECT_EQ(versions.preference().version, 6U);
}

TEST_F(CallVersionsTest, GivesUpAVersionThatIsGoneFromAllServers) {
  CallVersions versions(balance_, {});
  EXPECT_TRUE(Keeps(versions, "a", 1, 0));
  EXPECT_FALSE(Keeps(versions, "a", 2, 0));

  EXPECT_TRUE(Keeps(versions, "b", 2, 0));  // the call continues with version 2

  EXPECT_FALSE(
      Keeps(versions, "a", 1, 0));  // sent before the restart, so it says nothing about the server
  EXPECT_THAT(versions.preference().excluded, IsEmpty());
  EXPECT_EQ(balance_.states()[0].weights_versions.at("h"), 2U);
  EXPECT_TRUE(Keeps(versions, "a", 2, versions.epoch()));
}

TEST_F(CallVersionsTest, NeverGivesUpAPinnedVersion) {
  CallVersions versions(balance_, {.pinned = 5});

  EXPECT_TRUE(versions.Lacks("a"));
  EXPECT_FALSE(versions.Lacks("b"));

  EXPECT_EQ(versions.Mismatch().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(versions.Mismatch().message()), HasSubstr("version 5"));
  EXPECT_THAT(std::string(versions.Mismatch().message()), HasSubstr("a, b does not hold it"));
  EXPECT_EQ(versions.Stuck().status().code(), absl::StatusCode::kAborted);
}

TEST_F(CallVersionsTest, GivesUpOnServersThatKeepChangingAndNamesThem) {
  CallVersions versions(balance_, {});
  EXPECT_TRUE(Keeps(versions, "a", 1, 0));

  absl::Status status;
  for (uint64_t version = 2; status.ok(); ++version) {
    ASSERT_LT(version, 10U);
    status.Update(versions.Keeps("a", version, versions.epoch()).status());
    status.Update(versions.Keeps("b", version, versions.epoch()).status());
  }

  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(versions.epoch(), policy::kRestartsMax);
  EXPECT_THAT(std::string(status.message()), HasSubstr("version 1 at a; version 2 at a, b;"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("mix_weights_versions"));
}

TEST_F(CallVersionsTest, TakesEveryVersionWhereMixingIsAllowed) {
  CallVersions versions(balance_, {.mix = true});

  EXPECT_TRUE(Keeps(versions, "a", 1, 0));
  EXPECT_TRUE(Keeps(versions, "b", 2, 0));

  EXPECT_EQ(versions.preference().version, 0U);
  EXPECT_THAT(versions.preference().excluded, IsEmpty());
}

TEST_F(CallVersionsTest, BeginsAgainWhenItsVersionLeftWithItsServer) {
  CallVersions versions(balance_, {});
  EXPECT_TRUE(Keeps(versions, "a", 1, 0));
  EXPECT_FALSE(Keeps(versions, "b", 2, 0));
  EXPECT_FALSE(*versions.Stuck());

  balance_.Leave("a", "gone");

  EXPECT_TRUE(*versions.Stuck());
  EXPECT_TRUE(Keeps(versions, "b", 2, versions.epoch()));
  EXPECT_EQ(versions.kept(), 2U);
}

}  // namespace
}  // namespace logprobd::client
