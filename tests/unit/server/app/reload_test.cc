#include "server/app/reload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ServerOptions Valid() {
  ServerOptions options;
  options.model = "/models/a";
  return options;
}

TEST(ReloadTest, ChangesNothingWhereNothingHasChanged) {
  const auto reload = PlanReload(Valid(), Valid(), Valid());

  ASSERT_TRUE(reload.ok()) << reload.status();
  EXPECT_THAT(reload->applied, IsEmpty());
  EXPECT_THAT(reload->needs_restart, IsEmpty());
}

TEST(ReloadTest, TakesOverWhatIsReloadableAndNamesTheRest) {
  ServerOptions wanted = Valid();
  wanted.model = "/models/b";
  wanted.queue_rows = 7;
  wanted.log_level = "debug";
  wanted.batch_rows = 5;
  wanted.head_values = {{"shards", "default", "2"}};

  const auto reload = PlanReload(Valid(), Valid(), wanted);

  ASSERT_TRUE(reload.ok()) << reload.status();
  EXPECT_THAT(reload->applied, ElementsAre("queue-rows", "log-level"));
  EXPECT_THAT(reload->needs_restart, ElementsAre("model", "shards", "batch-rows"));
  EXPECT_EQ(reload->options.queue_rows, 7);
  EXPECT_EQ(reload->options.log_level, "debug");
  EXPECT_EQ(reload->options.model, "/models/a");
  EXPECT_EQ(reload->options.batch_rows, 8'192);
  EXPECT_THAT(reload->options.head_values, IsEmpty());
}

TEST(ReloadTest, EveryReloadableFlagIsTakenOver) {
  ServerOptions wanted = Valid();
  wanted.stream_window = 2;
  wanted.request_rows = 3;
  wanted.top_k_max = 4;
  wanted.candidates_max = 5;
  wanted.segments_max = 6;
  wanted.batch_wait_us = 7;
  wanted.queue_rows = 8;
  wanted.queue_bytes = 9'000;
  wanted.queue_requests = 10;
  wanted.client_share = 0.25;
  wanted.grace_s = 12;
  wanted.log_level = "error";

  const auto reload = PlanReload(Valid(), Valid(), wanted);

  ASSERT_TRUE(reload.ok()) << reload.status();
  EXPECT_THAT(reload->needs_restart, IsEmpty());
  size_t num_reloadable = 0;
  for (const Flag& flag : Flags()) {
    num_reloadable += flag.is_reloadable ? 1 : 0;
    EXPECT_EQ(FlagValueAsToml(flag, reload->options), FlagValueAsToml(flag, wanted)) << flag.name;
  }
  EXPECT_EQ(reload->applied.size(), num_reloadable);
}

TEST(ReloadTest, TakesOverNoMoreTopKThanTheWorkspaceHolds) {
  ServerOptions start = Valid();
  start.top_k_max = 50;
  ServerOptions current = start;
  current.top_k_max = 10;
  ServerOptions wanted = start;

  EXPECT_EQ(PlanReload(start, current, wanted)->options.top_k_max, 50);
  wanted.top_k_max = 51;
  const auto reload = PlanReload(start, current, wanted);

  ASSERT_TRUE(reload.ok()) << reload.status();
  EXPECT_EQ(reload->options.top_k_max, 10);
  EXPECT_THAT(reload->needs_restart, ElementsAre("top-k-max above 50"));
}

TEST(ReloadTest, RefusesWhatContradictsSettingsThatStay) {
  ServerOptions wanted = Valid();
  wanted.queue_bytes = int64_t{3} << 30;
  wanted.receive_bytes = int64_t{4} << 30;  // needs a restart, so 2 GiB stay

  const auto reload = PlanReload(Valid(), Valid(), wanted);

  EXPECT_EQ(reload.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(reload.status().message()), HasSubstr("--queue-bytes 3GiB"));
}

}  // namespace
}  // namespace logprobd
