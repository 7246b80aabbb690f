#include "server/app/heads/version_releaser.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "server/app/heads/plan.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_engine.h"
#include "tests/support/in_memory_head.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kEngineBytes = 1'000;

/// A version of one engine of kEngineBytes. Its destructor waits for `end`, unless that is null.
std::unique_ptr<VersionEngines> MakeVersion(absl::Notification* end = nullptr) {
  auto weights = MakeRandomHead({.vocab_size = 1'000, .hidden_size = 4});
  auto engine = std::make_unique<FakeEngine>(
      FakeEngine::Options{.memory = {{"host", "weights", kEngineBytes}}});
  if (end != nullptr) {
    engine->BlockDestructor(*end);
  }
  HeadInfo info = engine->info();
  std::vector<std::unique_ptr<ScoringEngine>> engines;
  engines.push_back(std::move(engine));
  auto version = VersionEngines::Create(info, std::move(weights), std::move(engines), {});
  EXPECT_TRUE(version.ok()) << version.status();
  return *std::move(version);
}

TEST(VersionReleaserTest, ReturnsWhenTheVersionIsDestroyed) {
  const FakeClock clock;
  VersionReleaser releaser(clock);

  EXPECT_TRUE(releaser.Release(nullptr));
  EXPECT_TRUE(releaser.Release(MakeVersion()));

  EXPECT_TRUE(releaser.memory().empty());
}

TEST(VersionReleaserTest, WaitsABoundedTimeAndCountsTheMemoryUntilTheEnd) {
  FakeClock clock;
  absl::Notification end;
  auto releaser = std::make_unique<VersionReleaser>(clock);
  auto released =
      std::async(std::launch::async, [&] { return releaser->Release(MakeVersion(&end)); });

  clock.WaitForWaiter(clock.Now() + VersionReleaser::kWaitMax);
  EXPECT_EQ(releaser->memory().front().bytes, kEngineBytes);
  clock.Advance(VersionReleaser::kWaitMax);
  EXPECT_FALSE(released.get());

  EXPECT_EQ(releaser->memory().front().bytes, kEngineBytes);
  EXPECT_TRUE(releaser->Release(MakeVersion()));  // others do not wait for it
  end.Notify();
  releaser = nullptr;  // waits for it
}

}  // namespace
}  // namespace logprobd::testing
