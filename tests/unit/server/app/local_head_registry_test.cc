#include "server/app/local_head_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "server/base/errors.h"
#include "server/base/text.h"

namespace logprobd {
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

TEST(LocalHeadRegistryTest, SaysThatNothingIsLoadedAndWhenToAskAgain) {
  const LocalHeadRegistry registry(Infos({"default"}));

  const absl::Status status = registry.Find("default").status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(RetryAfter(status), absl::Seconds(1));
  EXPECT_TRUE(registry.List().empty());
}

TEST(LocalHeadRegistryTest, FindsTheOnlyHeadWithoutItsName) {
  LocalHeadRegistry registry(Infos({"policy"}));
  registry.Publish(std::make_shared<NamedHead>("policy"));

  EXPECT_EQ((*registry.Find(""))->info()->name, "policy");
  EXPECT_EQ((*registry.Find("policy"))->info()->name, "policy");
  EXPECT_EQ(registry.List().size(), 1U);
}

TEST(LocalHeadRegistryTest, ListsTheNamesWhereOneIsWrongOrMissing) {
  LocalHeadRegistry registry(Infos({"policy", "reference"}));
  registry.Publish(std::make_shared<NamedHead>("policy"));
  registry.Publish(std::make_shared<NamedHead>("reference"));

  const absl::Status wrong = registry.Find("poliyc").status();
  EXPECT_EQ(wrong.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("policy, reference"));

  const absl::Status missing = registry.Find("").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("policy, reference"));
}

TEST(LocalHeadRegistryTest, FindsEachHeadAsSoonAsItIsLoaded) {
  LocalHeadRegistry registry(Infos({"policy", "reference"}));
  registry.Publish(std::make_shared<NamedHead>("policy"));

  EXPECT_EQ((*registry.Find("policy"))->info()->name, "policy");
  const absl::Status loading = registry.Find("reference").status();
  EXPECT_EQ(loading.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(loading.message(), "head \"reference\": the weights are being loaded");
  EXPECT_EQ(RetryAfter(loading), absl::Seconds(1));
  EXPECT_EQ(registry.Find("other").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(registry.Find("").status().code(), absl::StatusCode::kInvalidArgument);
}

// A client that picks its head from the list would else not find it and give up.
TEST(LocalHeadRegistryTest, ListsHeadsThatAreLoadingAsNotReady) {
  LocalHeadRegistry registry(Infos({"policy", "reference"}));
  registry.Publish(std::make_shared<NamedHead>("reference"));

  const auto heads = registry.List();

  ASSERT_EQ(heads.size(), 2U);
  EXPECT_EQ(heads[0]->info()->name, "policy");
  EXPECT_FALSE(heads[0]->ready());
  EXPECT_EQ(heads[0]->Submit({}, nullptr).status().code(), absl::StatusCode::kUnavailable);
  absl::StatusCode verified = absl::StatusCode::kOk;
  heads[0]->Verify({}, [&verified](const auto& report) { verified = report.status().code(); });
  EXPECT_EQ(verified, absl::StatusCode::kUnavailable);
  EXPECT_TRUE(heads[1]->ready());
}

TEST(LocalHeadRegistryTest, KeepsMessagesShortWhateverTheName) {
  LocalHeadRegistry registry(Infos({"policy"}));
  registry.Publish(std::make_shared<NamedHead>("policy"));

  EXPECT_LT(registry.Find(std::string(1 << 20, 'x')).status().message().size(), 200U);
}

// Found when a name of two-byte characters made the answer's text invalid UTF-8 for Protobuf
// clients.
TEST(LocalHeadRegistryTest, CutsANameBetweenCharacters) {
  LocalHeadRegistry registry(Infos({"policy"}));
  registry.Publish(std::make_shared<NamedHead>("policy"));
  const std::string name = "a" + std::string(63, 'b') + "\xC3\xA9";
  const std::string odd = std::string(63, 'b') + "\xC3\xA9";

  EXPECT_TRUE(IsUtf8(registry.Find(name).status().message()));
  EXPECT_TRUE(IsUtf8(registry.Find(odd).status().message()));
}

TEST(LocalHeadRegistryTest, ForgetsItsHeads) {
  LocalHeadRegistry registry(Infos({"policy"}));
  registry.Publish(std::make_shared<NamedHead>("policy"));

  registry.Clear();

  EXPECT_TRUE(registry.List().empty());
  EXPECT_EQ(registry.Find("policy").status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace logprobd
