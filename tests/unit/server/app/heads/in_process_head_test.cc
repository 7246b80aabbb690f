#include "server/app/heads/in_process_head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/app/heads/verify_probe.h"
#include "server/base/errors.h"
#include "server/engine/engines.h"
#include "tests/support/fake_engine.h"
#include "tests/support/in_memory_head.h"
#include "tests/support/test_requests.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// An asynchronous answer that a test waits for.
template <typename T>
class Answer {
 public:
  auto Callback() {
    return [this](absl::StatusOr<T> value) {
      value_ = std::move(value);
      done_.Notify();
    };
  }
  const absl::StatusOr<T>& Wait() {
    done_.WaitForNotification();
    return value_;
  }

 private:
  absl::StatusOr<T> value_;
  absl::Notification done_;
};

Batcher::Options SmallBatches() {
  Batcher::Options options;
  options.batch_rows_max = 64;
  options.batch_wait_max = absl::ZeroDuration();
  return options;
}

class InProcessHeadTest : public ::testing::Test {
 protected:
  InProcessHeadTest() { MakeHead({{}}); }

  /// Makes the head with one replica for each of `engines`.
  void MakeHead(const std::vector<testing::FakeEngine::Options>& engines) {
    std::vector<std::unique_ptr<ScoringEngine>> replicas;
    engines_.clear();
    for (const testing::FakeEngine::Options& options : engines) {
      auto engine = std::make_unique<testing::FakeEngine>(options);
      engines_.push_back(engine.get());
      replicas.push_back(std::move(engine));
    }
    engine_ = engines_.front();
    HeadInfo info = engine_->info();
    info.name = "default";
    auto weights = testing::MakeRandomHead(
        {.vocab_size = info.vocab_size, .hidden_size = info.hidden_size, .dtype = info.dtype});
    head_ = *InProcessHead::Create(info, std::move(weights), std::move(replicas), SmallBatches(),
                                   Clock::Steady(), metrics_);
  }

  Metrics metrics_{{.heads = {"default"}}};
  std::vector<testing::FakeEngine*> engines_;
  testing::FakeEngine* engine_ = nullptr;  // the first of `engines_`
  std::shared_ptr<InProcessHead> head_;
};

TEST_F(InProcessHeadTest, ScoresARequest) {
  const ScoreRequest request = testing::RequestOfRows(3);
  const ScoreResult expected = testing::ExpectedResult(request);
  Answer<ScoreResult> answer;

  ASSERT_TRUE(head_->Submit(testing::RequestOfRows(3), answer.Callback()).ok());

  ASSERT_TRUE(answer.Wait().ok()) << answer.Wait().status();
  EXPECT_EQ(testing::Differences(*answer.Wait(), expected), "");
}

TEST_F(InProcessHeadTest, IsReadyWhileItsEngineIsHealthy) {
  EXPECT_TRUE(head_->ready());

  engine_->SetHealthy(false);

  EXPECT_FALSE(head_->ready());
  EXPECT_FALSE(head_->healthy());
}

TEST_F(InProcessHeadTest, IsReadyWhileAnyReplicaIsHealthy) {
  MakeHead({{}, {}, {}});
  EXPECT_EQ(head_->num_replicas(), 3);
  EXPECT_EQ(head_->num_healthy(), 3);

  engines_[0]->SetHealthy(false);
  engines_[2]->SetHealthy(false);
  EXPECT_TRUE(head_->ready());
  EXPECT_TRUE(head_->healthy());
  EXPECT_EQ(head_->num_healthy(), 1);
  EXPECT_FALSE(head_->is_replica_healthy(0));
  EXPECT_TRUE(head_->is_replica_healthy(1));
  engines_[1]->SetHealthy(false);

  EXPECT_FALSE(head_->ready());
  EXPECT_FALSE(head_->healthy());
}

TEST_F(InProcessHeadTest, ScoresOnTheHealthyReplicas) {
  MakeHead({{}, {}});
  engines_[0]->SetHealthy(false);
  Answer<ScoreResult> answer;

  ASSERT_TRUE(head_->Submit(testing::RequestOfRows(3), answer.Callback()).ok());

  EXPECT_TRUE(answer.Wait().ok()) << answer.Wait().status();
  EXPECT_EQ(engines_[0]->num_batches(), 0);
  EXPECT_EQ(engines_[1]->num_batches(), 1);
}

TEST_F(InProcessHeadTest, PublishesAndAppliesNewLimits) {
  const std::shared_ptr<const HeadInfo> before = head_->info();
  Batcher::Options options = SmallBatches();
  options.queue_rows_max = 4;
  options.client_share_max = 1;
  RequestLimits limits;
  limits.top_k_max = 3;
  Answer<ScoreResult> answer;

  ASSERT_TRUE(head_->SetLimits(options, limits).ok());

  EXPECT_EQ(head_->info()->limits.top_k_max, 3);
  EXPECT_EQ(head_->info()->name, "default");
  EXPECT_EQ(before->limits.top_k_max, 128);  // a published info does not change
  EXPECT_EQ(head_->Submit(testing::RequestOfRows(5), answer.Callback()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(InProcessHeadTest, SumsTheMemoryOfItsReplicas) {
  MakeHead({{.memory = {{"gpu0", "weights", 100}, {"host", "workspace", 7, true}}},
            {.memory = {{"gpu1", "weights", 100}, {"host", "workspace", 5, true}}},
            {.memory = {{"gpu1", "weights", 20}, {"host", "workspace", 1}}}});
  std::vector<std::string> uses;

  for (const MemoryUse& use : head_->memory()) {
    uses.push_back(
        absl::StrCat(use.place, " ", use.kind, " ", use.bytes, use.is_pinned ? "p" : ""));
  }

  EXPECT_THAT(uses, ElementsAre("gpu0 weights 100", "host workspace 12p", "gpu1 weights 120",
                                "host workspace 1", absl::StrCat("host staging ", 3 * 2 * 64 * 8)));
}

TEST_F(InProcessHeadTest, RefusesWorkOnceItDrains) {
  EXPECT_TRUE(head_->Drain(absl::InfiniteFuture()));

  EXPECT_FALSE(head_->ready());
  EXPECT_TRUE(head_->healthy());
  EXPECT_EQ(head_->Submit(testing::RequestOfRows(1), [](auto) {}).status().code(),
            absl::StatusCode::kUnavailable);
  Answer<VerifyReport> report;
  head_->Verify({}, report.Callback());
  EXPECT_EQ(report.Wait().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(InProcessHeadTest, VerifyDetectsAnEngineWithWrongScores) {
  Answer<VerifyReport> report;

  head_->Verify({.rows = 4, .seed = 9}, report.Callback());

  ASSERT_TRUE(report.Wait().ok()) << report.Wait().status();
  EXPECT_FALSE(report.Wait()->passed);
  EXPECT_EQ(report.Wait()->rows, 4);
  EXPECT_GT(report.Wait()->logprob_difference_max, kVerifyLogprobTolerance);
}

TEST_F(InProcessHeadTest, RunsOneVerifyAtATime) {
  engine_->Hold();
  Answer<VerifyReport> first;
  Answer<VerifyReport> second;
  Answer<VerifyReport> third;
  head_->Verify({}, first.Callback());
  head_->Verify({}, second.Callback());

  EXPECT_EQ(second.Wait().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfter(second.Wait().status()).has_value());

  engine_->Release();
  EXPECT_TRUE(first.Wait().ok());
  head_->Verify({}, third.Callback());
  EXPECT_TRUE(third.Wait().ok()) << third.Wait().status();
}

TEST_F(InProcessHeadTest, VerifyChecksItsNumberOfRows) {
  for (const int32_t rows : {0, -1, 65}) {
    Answer<VerifyReport> report;
    head_->Verify({.rows = rows}, report.Callback());
    EXPECT_EQ(report.Wait().status().code(), absl::StatusCode::kInvalidArgument) << rows;
  }
}

TEST_F(InProcessHeadTest, VerifyReportsTheEnginesError) {
  engine_->FailNext(absl::InternalError("a device fault"));
  Answer<VerifyReport> report;

  head_->Verify({}, report.Callback());

  EXPECT_EQ(report.Wait().status().code(), absl::StatusCode::kInternal);
}

TEST(InProcessHeadOnCpuTest, VerifyPassesOnTheRealEngine) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    auto weights = testing::MakeRandomHead({.vocab_size = 3'000,
                                            .hidden_size = 256,
                                            .padding_rows = 8,
                                            .dtype = dtype,
                                            .bias = true,
                                            .scale = 0.25F,
                                            .softcap = 30});
    const EngineOptions options{.device = Device::kCpu, .batch_rows_max = 64, .cpu_threads = 2};
    const auto plan = PlanEngine(weights->info(), options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    auto engines = CreateEngines(*weights, *plan, options);
    ASSERT_TRUE(engines.ok()) << engines.status();
    Metrics metrics({.heads = {"default"}});
    const HeadInfo info = weights->info();
    const auto head = InProcessHead::Create(info, std::move(weights), *std::move(engines),
                                            SmallBatches(), Clock::Steady(), metrics);
    ASSERT_TRUE(head.ok()) << head.status();
    Answer<VerifyReport> report;

    (*head)->Verify({.rows = 64, .seed = 3}, report.Callback());

    ASSERT_TRUE(report.Wait().ok()) << report.Wait().status();
    EXPECT_TRUE(report.Wait()->passed)
        << DtypeName(dtype) << " " << report.Wait()->logprob_difference_max << " "
        << report.Wait()->entropy_difference_max;
    EXPECT_GT(report.Wait()->logit_stddev, 2);
    EXPECT_GT(report.Wait()->seconds, 0);
  }
}

// Regression: the report of weights with a NaN blamed the engine.
TEST_F(InProcessHeadTest, VerifyTellsTheClientThatTheWeightsAreNotFinite) {
  const auto made = testing::MakeRandomHead({.vocab_size = 1'000, .hidden_size = 4});
  std::vector<std::byte> weight(made->weight(), made->weight() + made->info().weight_bytes);
  weight[17 * 8] = weight[17 * 8 + 1] = std::byte{0xFF};  // a NaN
  testing::FakeEngine engine;
  std::vector<std::unique_ptr<ScoringEngine>> engines;
  engines.push_back(std::make_unique<testing::FakeEngine>());
  const auto head = InProcessHead::Create(
      engine.info(), std::make_unique<testing::InMemoryHead>(made->info(), std::move(weight)),
      std::move(engines), SmallBatches(), Clock::Steady(), metrics_);
  ASSERT_TRUE(head.ok()) << head.status();
  Answer<VerifyReport> report;

  (*head)->Verify({}, report.Callback());

  EXPECT_EQ(report.Wait().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(HasDetailsForLog(report.Wait().status()));
  EXPECT_THAT(report.Wait().status().message(), HasSubstr("row 17 column 0 is NaN or Inf"));
}

TEST_F(InProcessHeadTest, VerifiesAgainAfterAVerifyWasStopped) {
  engine_->Hold();  // holds back the scores of the probe
  Answer<VerifyReport> stopped;
  const auto stop = std::make_shared<std::atomic<bool>>(false);
  head_->Verify({.stop = stop}, stopped.Callback());
  engine_->WaitUntilInFlight(1);

  stop->store(true);

  EXPECT_EQ(stopped.Wait().status().code(), absl::StatusCode::kCancelled);
  engine_->Release();
  Answer<VerifyReport> next;
  head_->Verify({}, next.Callback());
  EXPECT_TRUE(next.Wait().ok()) << next.Wait().status();
}

TEST_F(InProcessHeadTest, EndsAVerifyWhenItIsDestroyed) {
  engine_->Hold();
  Answer<VerifyReport> report;
  head_->Verify({}, report.Callback());

  std::thread releasing([this] {
    engine_->WaitUntilInFlight(1);
    engine_->Release();
  });
  releasing.join();
  head_.reset();  // the Verify may be about to submit, scoring, or done

  report.Wait();
}

// Regression: the callback was called under a lock, so a callback that called Verify again
// deadlocked.
TEST_F(InProcessHeadTest, AnswersARefusedVerifyUnderNoLock) {
  engine_->Hold();
  Answer<VerifyReport> first;
  head_->Verify({}, first.Callback());
  Answer<VerifyReport> third;

  head_->Verify({}, [&](const absl::StatusOr<VerifyReport>& second) {
    EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
    head_->Verify({}, third.Callback());
  });

  EXPECT_EQ(third.Wait().status().code(), absl::StatusCode::kResourceExhausted);
  engine_->Release();
  EXPECT_TRUE(first.Wait().ok());
}

}  // namespace
}  // namespace logprobd
