#include "server/app/heads/load_control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tests/support/in_memory_head.h"

namespace logprobd {
namespace {

using ::testing::IsSupersetOf;

TEST(LoadTickerTest, ReportsTheBeginningAndTheEndOfEachPhase) {
  std::vector<std::string> reports;
  const LoadTicker::Progress progress = [&](const WeightsProgress& step) {
    reports.push_back(absl::StrCat(step.phase, " ", step.bytes_done, "/", step.bytes_total));
    return true;
  };
  const std::atomic<bool> is_stopped = false;
  LoadTicker ticker(progress, is_stopped);

  for (const char* const phase : {"verifying", "loading"}) {
    for (int64_t done = 0; done <= 1'000'000; ++done) {
      ASSERT_TRUE(ticker.Report(phase, done, 1'000'000).ok());
    }
  }

  EXPECT_THAT(reports, IsSupersetOf({"verifying 0/1000000", "verifying 1000000/1000000",
                                     "loading 0/1000000", "loading 1000000/1000000"}));
  EXPECT_LT(reports.size(), 1'000U);
}

TEST(LoadTickerTest, EndsALoadThatItsCallerCancels) {
  const LoadTicker::Progress progress = [](const WeightsProgress&) { return false; };
  const std::atomic<bool> is_stopped = false;

  EXPECT_EQ(LoadTicker(progress, is_stopped).Report("checking", 0, 0).code(),
            absl::StatusCode::kCancelled);
}

TEST(LoadTickerTest, EndsALoadWhenTheServerStopsEvenWithoutACallback) {
  const LoadTicker::Progress none;
  std::atomic<bool> is_stopped = false;
  LoadTicker ticker(none, is_stopped);
  EXPECT_TRUE(ticker.Report("loading", 1, 2).ok());

  is_stopped = true;

  EXPECT_EQ(ticker.Report("loading", 1, 2).code(), absl::StatusCode::kUnavailable);
}

TEST(StoppableWeightsTest, ReadsUntilItIsStopped) {
  const auto head = testing::MakeRandomHead({.vocab_size = 4, .hidden_size = 2});
  std::atomic<bool> stop = false;
  const StoppableWeights weights(*head, stop);
  std::vector<std::byte> row(4);

  EXPECT_TRUE(weights.ReadRows(0, 1, row.data(), 4).ok());
  EXPECT_EQ(&weights.info(), &head->info());
  stop = true;

  EXPECT_TRUE(absl::IsCancelled(weights.ReadRows(0, 1, row.data(), 4)));
}

}  // namespace
}  // namespace logprobd
