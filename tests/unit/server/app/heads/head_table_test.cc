#include "server/app/heads/head_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/base/errors.h"
#include "server/base/text.h"
#include "tests/unit/server/app/heads/head_versions_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

class NamedHead final : public ServedHead {
 public:
  explicit NamedHead(const std::string& name) { info_.name = name; }
  std::shared_ptr<const HeadInfo> info() const override {
    return std::make_shared<const HeadInfo>(info_);
  }
  bool ready() const override { return true; }
  absl::StatusOr<RequestTicket> Submit(ScoreRequest /*request*/, ScoreCallback /*done*/) override {
    return 1;
  }
  void Cancel(RequestTicket /*ticket*/) override {}
  void Verify(const VerifyOptions& /*options*/, VerifyCallback /*done*/) override {}

 private:
  HeadInfo info_;
};

std::vector<HeadInfo> Infos(const std::vector<std::string>& names) {
  std::vector<HeadInfo> infos(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    infos[i].name = names[i];
  }
  return infos;
}

TEST(HeadTableTest, SaysThatNothingIsLoadedAndWhenToRetry) {
  const HeadTable table(Infos({"default"}));

  const absl::Status status = table.Find("default").status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(RetryAfter(status), absl::Seconds(1));
  EXPECT_TRUE(table.List().empty());
}

TEST(HeadTableTest, NamesTheOnlyHeadOfACallThatNamesNone) {
  EXPECT_EQ(HeadTable(Infos({"policy"})).NameOf(""), "policy");
  EXPECT_EQ(HeadTable(Infos({"policy"})).NameOf("other"), "other");
  EXPECT_EQ(HeadTable(Infos({"policy", "draft"})).NameOf(""), "");
}

TEST(HeadTableTest, FindsTheOnlyHeadWithoutItsName) {
  HeadTable table(Infos({"policy"}));
  table.Publish(std::make_shared<NamedHead>("policy"), nullptr);

  EXPECT_EQ((*table.Find(""))->info()->name, "policy");
  EXPECT_EQ((*table.Find("policy"))->info()->name, "policy");
  EXPECT_EQ(table.List().size(), 1U);
}

TEST(HeadTableTest, ListsTheNamesIfOneIsUnknownOrMissing) {
  HeadTable table(Infos({"policy", "reference"}));
  table.Publish(std::make_shared<NamedHead>("policy"), nullptr);
  table.Publish(std::make_shared<NamedHead>("reference"), nullptr);

  const absl::Status wrong = table.Find("poliyc").status();
  EXPECT_EQ(wrong.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("policy, reference"));

  const absl::Status missing = table.Find("").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("policy, reference"));
}

TEST(HeadTableTest, FindsEachHeadAsSoonAsItIsLoaded) {
  HeadTable table(Infos({"policy", "reference"}));
  table.Publish(std::make_shared<NamedHead>("policy"), nullptr);

  EXPECT_EQ((*table.Find("policy"))->info()->name, "policy");
  const absl::Status loading = table.Find("reference").status();
  EXPECT_EQ(loading.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(loading.message(), "head \"reference\": the weights are being loaded");
  EXPECT_EQ(RetryAfter(loading), absl::Seconds(1));
  EXPECT_EQ(table.Find("other").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(table.Find("").status().code(), absl::StatusCode::kInvalidArgument);
}

// A client that picks its head from the list would otherwise not find it and give up.
TEST(HeadTableTest, ListsHeadsThatAreLoadingAsNotReady) {
  HeadTable table(Infos({"policy", "reference"}));
  table.Publish(std::make_shared<NamedHead>("reference"), nullptr);

  const auto heads = table.List();

  ASSERT_EQ(heads.size(), 2U);
  EXPECT_EQ(heads[0]->info()->name, "policy");
  EXPECT_FALSE(heads[0]->ready());
  EXPECT_EQ(heads[0]->Submit({}, nullptr).status().code(), absl::StatusCode::kUnavailable);
  absl::StatusCode verified = absl::StatusCode::kOk;
  heads[0]->Verify({}, [&verified](const auto& report) { verified = report.status().code(); });
  EXPECT_EQ(verified, absl::StatusCode::kUnavailable);
  EXPECT_TRUE(heads[1]->ready());
}

TEST(HeadTableTest, KeepsMessagesShortForLongNames) {
  HeadTable table(Infos({"policy"}));
  table.Publish(std::make_shared<NamedHead>("policy"), nullptr);

  EXPECT_LT(table.Find(std::string(1 << 20, 'x')).status().message().size(), 200U);
}

// Regression: a name of two-byte characters made the text of the answer invalid UTF-8 for Protobuf
// clients.
TEST(HeadTableTest, CutsANameBetweenCharacters) {
  HeadTable table(Infos({"policy"}));
  table.Publish(std::make_shared<NamedHead>("policy"), nullptr);
  const std::string name = "a" + std::string(63, 'b') + "\xC3\xA9";
  const std::string odd = std::string(63, 'b') + "\xC3\xA9";

  EXPECT_TRUE(IsUtf8(table.Find(name).status().message()));
  EXPECT_TRUE(IsUtf8(table.Find(odd).status().message()));
}

TEST(HeadTableTest, ForgetsItsHeads) {
  HeadTable table(Infos({"policy"}));
  table.Publish(std::make_shared<NamedHead>("policy"), nullptr);

  table.Clear();

  EXPECT_TRUE(table.List().empty());
  EXPECT_EQ(table.Find("policy").status().code(), absl::StatusCode::kUnavailable);
}

class HeadTableWeightsTest : public HeadVersionsTest {
 protected:
  void PublishOne() {
    Make();
    table_.Publish(head_, std::shared_ptr<HeadVersions>(std::move(versions_)));
  }

  ~HeadTableWeightsTest() override { table_.Clear(); }

  HeadTable table_{Infos({"default"})};
};

TEST_F(HeadTableWeightsTest, SaysThatNothingIsLoadedAndWhenToRetry) {
  const std::vector<absl::Status> all = {
      table_.Load({.path = "/m/2"}, {}).status(), table_.Commit("", 0).status(),
      table_.Rollback("").status(), table_.Discard("", true, true).status(),
      table_.List("").status()};
  for (const absl::Status& status : all) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(RetryAfter(status), absl::Seconds(1));
  }
}

TEST_F(HeadTableWeightsTest, ChangesTheNamedHeadOrTheOnlyOne) {
  PublishOne();

  EXPECT_EQ(table_.Load({.head = "default", .path = "/m/2"}, {})->version, 2U);
  EXPECT_EQ(table_.Commit("", 2)->live.version, 2U);
  EXPECT_EQ(table_.Rollback("default")->live.version, 1U);
  EXPECT_FALSE(table_.Discard("", false, true)->previous.has_value());
  EXPECT_EQ(table_.List("")->at(0).live.version, 1U);
  EXPECT_EQ(table_.List("default")->size(), 1U);
}

TEST_F(HeadTableWeightsTest, ListsTheHeadsIfTheNameIsUnknown) {
  PublishOne();

  for (const absl::Status& status :
       {table_.Commit("other", 0).status(), table_.List("other").status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(status.message(), "head: \"other\" is not served here; the heads are: default");
  }
}

// Regression: without a name the head that was loaded first was changed, and the other head was
// unknown.
TEST_F(HeadTableWeightsTest, KnowsTheHeadsThatAreNotYetLoaded) {
  Make();
  HeadTable table(Infos({"default", "reference"}));
  table.Publish(head_, std::shared_ptr<HeadVersions>(std::move(versions_)));

  EXPECT_EQ(table.Load({.path = "/m/2"}, {}).status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status loading = table.Commit("reference", 0).status();
  EXPECT_EQ(loading.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(loading.message(), "head \"reference\": the weights are being loaded");
  EXPECT_EQ(RetryAfter(loading), absl::Seconds(1));
  EXPECT_EQ(table.List("")->size(), 1U);
  table.Clear();
}

TEST_F(HeadTableWeightsTest, RefusesChangesOnceItIsStopped) {
  PublishOne();

  table_.StopChanges();

  const absl::Status status = table_.Load({.path = "/m/2"}, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("shutting down"));
  EXPECT_EQ(ScoredBy(), 1U);
}

}  // namespace
}  // namespace logprobd::testing
