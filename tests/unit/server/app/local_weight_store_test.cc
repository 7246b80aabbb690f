#include "server/app/local_weight_store.h"

#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/errors.h"
#include "tests/unit/server/app/head_versions_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

class LocalWeightStoreTest : public HeadVersionsTest {
 protected:
  void PublishOne() {
    Make();
    store_.Publish(std::shared_ptr<HeadVersions>(std::move(versions_)));
  }

  ~LocalWeightStoreTest() override { store_.Clear(); }

  LocalWeightStore store_{{"default"}};
};

TEST_F(LocalWeightStoreTest, SaysThatNothingIsLoadedAndWhenToAskAgain) {
  const std::vector<absl::Status> all = {
      store_.Load({.path = "/m/2"}, {}).status(), store_.Commit("", 0).status(),
      store_.Rollback("").status(), store_.Discard("", true, true).status(),
      store_.List("").status()};
  for (const absl::Status& status : all) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(RetryAfter(status), absl::Seconds(1));
  }
}

TEST_F(LocalWeightStoreTest, ChangesTheHeadThatIsNamedOrTheOnlyOne) {
  PublishOne();

  EXPECT_EQ(store_.Load({.head = "default", .path = "/m/2"}, {})->version, 2U);
  EXPECT_EQ(store_.Commit("", 2)->live.version, 2U);
  EXPECT_EQ(store_.Rollback("default")->live.version, 1U);
  EXPECT_FALSE(store_.Discard("", false, true)->previous.has_value());
  EXPECT_EQ(store_.List("")->at(0).live.version, 1U);
  EXPECT_EQ(store_.List("default")->size(), 1U);
}

TEST_F(LocalWeightStoreTest, NamesTheHeadsThatAreThere) {
  PublishOne();

  for (const absl::Status& status :
       {store_.Commit("other", 0).status(), store_.List("other").status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(status.message(), "head: no \"other\" here; there is: default");
  }
}

// Without a name the head that was loaded first was changed, and the other did not exist.
TEST_F(LocalWeightStoreTest, KnowsTheHeadsThatAreYetToCome) {
  Make();
  LocalWeightStore store({"default", "reference"});
  store.Publish(std::shared_ptr<HeadVersions>(std::move(versions_)));

  EXPECT_EQ(store.Load({.path = "/m/2"}, {}).status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status loading = store.Commit("reference", 0).status();
  EXPECT_EQ(loading.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(loading.message(), "head \"reference\": the weights are being loaded");
  EXPECT_EQ(RetryAfter(loading), absl::Seconds(1));
  EXPECT_EQ(store.List("")->size(), 1U);
  store.Clear();
}

TEST_F(LocalWeightStoreTest, RefusesChangesOnceItIsStopped) {
  PublishOne();

  store_.Stop();

  const absl::Status status = store_.Load({.path = "/m/2"}, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("shutting down"));
  EXPECT_EQ(ScoredBy(), 1U);
}

}  // namespace
}  // namespace logprobd::testing
