#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "server/base/clock.h"
#include "server/base/errors.h"
#include "server/batching/batcher.h"
#include "server/batching/version_replicas.h"
#include "tests/support/batcher_on.h"
#include "tests/support/fake_engine.h"
#include "tests/support/test_requests.h"

namespace logprobd::testing {
namespace {

constexpr int kThreads = 4;
constexpr int kRequestsPerThread = 400;
constexpr int64_t kQueueRowsMax = 4'000;

RequestSpec RandomSpec(std::mt19937& random, int thread, uint32_t seed) {
  const auto below = [&](uint32_t limit) { return static_cast<int32_t>(random() % limit); };
  RequestSpec spec{.rows = below(8) == 0 ? below(600) : below(20), .seed = seed};
  spec.client_id = std::to_string(below(2) == 0 ? 0 : thread);
  if (spec.client_id == "0") {
    spec.sub_client_id = std::to_string(below(5));
  }
  spec.priority = static_cast<Priority>(below(3));
  spec.dtype = below(4) == 0 ? Dtype::kF32 : Dtype::kBf16;
  spec.top_k = below(3);
  if (below(4) == 0) {
    spec.place = PayloadPlace::kDevice;
    spec.gpu = 0;
  } else {
    spec.piece_bytes = 1 + below(40);
  }
  for (int64_t row = 0; row < spec.rows; ++row) {
    if (below(5) == 0) {
      spec.ignored_rows.push_back(row);
    }
  }
  if (below(10) == 0) {
    spec.deadline = Clock::Steady().Now() + absl::Microseconds(below(2'000));
  }
  return spec;
}

/// The parameter is the number of replicas. With several, one of them fails for good during the
/// test.
class BatcherStressTest : public ::testing::TestWithParam<int> {
 protected:
  BatcherStressTest() {
    for (int i = 0; i < GetParam(); ++i) {
      engines_.push_back(std::make_unique<FakeEngine>(
          FakeEngine::Options{.batch_rows_max = 64, .reads_in_place = true, .record = false}));
      replicas_.push_back(engines_.back().get());
    }
  }

  std::vector<std::unique_ptr<FakeEngine>> engines_;
  std::vector<ScoringEngine*> replicas_;
};

TEST_P(BatcherStressTest, EndsEveryRequestOnceAndReleasesAllBudgets) {
  const std::vector<std::string> priorities = {"high", "normal", "low"};
  Metrics metrics({.heads = {"default"}, .version = "test", .commit = "test"});
  auto created = BatcherOn(replicas_,
                           {.batch_rows_max = 64,
                            .batch_wait_max = absl::Microseconds(50),
                            .queue_rows_max = kQueueRowsMax},
                           Clock::Steady(), metrics);
  ASSERT_TRUE(created.ok());
  std::shared_ptr<Batcher> batcher = *std::move(created);
  std::atomic<int> admitted = 0;
  std::atomic<int> refused = 0;
  std::atomic<int> answered = 0;
  std::atomic<int> succeeded = 0;
  std::atomic<int> wrong = 0;

  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(static_cast<uint32_t>(thread));
      std::vector<RequestTicket> tickets;
      for (int i = 0; i < kRequestsPerThread; ++i) {
        ScoreRequest request =
            MakeRequest(RandomSpec(random, thread, static_cast<uint32_t>(thread * 10'000 + i)));
        auto expected = std::make_shared<const ScoreResult>(ExpectedResult(request));
        auto called = std::make_shared<std::atomic<bool>>(false);
        const auto ticket = batcher->Submit(
            std::move(request), [&, expected, called](absl::StatusOr<ScoreResult> result) {
              LOGPROBD_CHECK(!called->exchange(true), "a callback was called twice");
              ++answered;
              if (result.ok()) {
                ++succeeded;
                wrong += Differences(*result, *expected).empty() ? 0 : 1;
              }
            });
        if (!ticket.ok()) {
          ++refused;
          continue;
        }
        ++admitted;
        tickets.push_back(*ticket);
        if (random() % 4 == 0) {
          batcher->Cancel(tickets[random() % tickets.size()]);
        }
        if (random() % 50 == 0) {
          engines_[random() % engines_.size()]->FailNext(
              random() % 2 == 0 ? absl::InternalError("fault")
                                : absl::ResourceExhaustedError("memory"));
        }
        if (i == kRequestsPerThread / 2 && engines_.size() > 1) {
          engines_.front()->SetHealthy(false);
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(batcher->Drain(absl::InfiniteFuture()));

  EXPECT_EQ(answered, admitted);
  EXPECT_EQ(admitted + refused, kThreads * kRequestsPerThread);
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(succeeded, 0);
  batcher = nullptr;  // Publishes the gauges for the last time.
  const std::string text = metrics.Serialize();
  for (const std::string& priority : priorities) {
    for (const char* gauge : {"rows", "bytes", "requests"}) {
      const std::string series = absl::StrCat("logprobd_queue_", gauge,
                                              "{head=\"default\",priority=\"", priority, "\"} 0");
      EXPECT_NE(text.find(absl::StrCat(series, "\n")), std::string::npos) << series;
    }
  }
}

TEST_P(BatcherStressTest, AnswersEverythingWhenDestroyedUnderLoad) {
  for (uint32_t round = 0; round < 20; ++round) {
    Metrics metrics({.heads = {"default"}, .version = "test", .commit = "test"});
    auto batcher = BatcherOn(replicas_, {.batch_rows_max = 16}, Clock::Steady(), metrics);
    ASSERT_TRUE(batcher.ok());
    std::atomic<int> admitted = 0;
    std::atomic<int> answered = 0;
    std::thread submitter([&] {
      std::mt19937 random(round);
      for (uint32_t i = 0; i < 200; ++i) {
        const auto ticket = (*batcher)->Submit(MakeRequest(RandomSpec(random, 1, i)),
                                               [&](absl::StatusOr<ScoreResult>) { ++answered; });
        admitted += ticket.ok() ? 1 : 0;
      }
    });
    submitter.join();

    *batcher = nullptr;

    EXPECT_EQ(answered, admitted);
  }
}

// Every row of an answer must have the logprob of the version that the answer names.
TEST(BatcherSwapStressTest, NeverMixesVersionsNorFailsARequest) {
  constexpr int kSwaps = 300;
  const Batcher::Options kOptions = {
      .batch_rows_max = 64, .batch_wait_max = absl::Microseconds(50), .client_share_max = 1};
  Metrics metrics({.heads = {"default"}, .version = "test", .commit = "test"});
  std::vector<std::unique_ptr<FakeEngine>> engines;
  std::vector<std::unique_ptr<VersionReplicas>> versions;
  for (uint64_t version = 1; version <= 2; ++version) {
    engines.push_back(std::make_unique<FakeEngine>(
        FakeEngine::Options{.batch_rows_max = 64,
                            .weights_version = version,
                            .logprob_offset = -100 * static_cast<float>(version),
                            .reads_in_place = true,
                            .record = false}));
    auto replicas = VersionReplicas::Create(kOptions, {engines.back().get()});
    ASSERT_TRUE(replicas.ok());
    versions.push_back(*std::move(replicas));
  }
  auto created = Batcher::Create(kOptions, *versions[0], Clock::Steady(), metrics);
  ASSERT_TRUE(created.ok());
  std::shared_ptr<Batcher> batcher = *std::move(created);
  std::atomic<bool> is_over = false;
  std::atomic<int> failed = 0;
  std::atomic<int> wrong = 0;
  std::array<std::atomic<int>, 3> of_version{};

  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(static_cast<uint32_t>(thread));
      for (uint32_t i = 0; !is_over; ++i) {
        RequestSpec spec = RandomSpec(random, thread, i);
        spec.deadline = absl::InfiniteFuture();
        ScoreRequest request = MakeRequest(spec);
        const ScoreResult expected = ExpectedResult(request);
        const std::vector<int32_t> targets = request.targets;
        absl::Notification done;
        const auto ticket =
            batcher->Submit(std::move(request), [&](absl::StatusOr<ScoreResult> result) {
              if (!result.ok()) {
                ++failed;
              } else {
                ++of_version[result->weights_version];
                const float offset = -100 * static_cast<float>(result->weights_version);
                for (size_t row = 0; row < targets.size(); ++row) {
                  const float want =
                      expected.logprob[row] + (targets[row] == kDefaultIgnoreIndex ? 0 : offset);
                  wrong += result->logprob[row] == want ? 0 : 1;
                }
              }
              done.Notify();
            });
        ASSERT_TRUE(ticket.ok()) << ticket.status();
        done.WaitForNotification();
      }
    });
  }
  const auto answers = [&of_version] { return of_version[1] + of_version[2]; };
  for (size_t swap = 1; swap <= kSwaps; ++swap) {
    for (const int before = answers(); answers() < before + kThreads && failed == 0;) {
      std::this_thread::yield();
    }
    if (swap % 7 == 0) {  // No version is live, as when weights are replaced in place.
      batcher->Commit(nullptr);
      batcher->AwaitRetired();
    }
    batcher->Commit(versions[swap % 2].get());
    batcher->AwaitRetired();
  }
  is_over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }

  EXPECT_EQ(failed, 0);
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(of_version[1], 0);
  EXPECT_GT(of_version[2], 0);
}

// The preset tsan selects tests by the beginning of their names.
INSTANTIATE_TEST_SUITE_P(BatcherReplicas, BatcherStressTest, ::testing::Values(1, 3),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace logprobd::testing
