#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/base/clock.h"
#include "server/batching/batcher.h"
#include "server/batching/device_turns.h"
#include "server/batching/version_replicas.h"
#include "tests/support/batcher_on.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

/// Two heads on one device, each with a batcher and an engine.
class BatcherTurnsTest : public ::testing::Test {
 protected:
  BatcherTurnsTest() {
    for (int head = 0; head < 2; ++head) {
      engines_[head].Hold();
      Batcher::Options options;
      options.batch_wait_max = absl::ZeroDuration();
      options.turns = &turns_;
      options.turns_head = head;
      auto batcher = BatcherOn({&engines_[head]}, options, clock_, metrics_);
      EXPECT_TRUE(batcher.ok()) << batcher.status();
      batchers_[head] = *std::move(batcher);
    }
  }

  ~BatcherTurnsTest() override {
    for (FakeEngine& engine : engines_) {
      engine.Release();
    }
  }

  /// Submits a row and waits until both batch threads sleep.
  Answer& Submit(int head) {
    answers_.push_back(std::make_unique<Answer>());
    const auto ticket = batchers_[head]->Submit(RequestOfRows(1), answers_.back()->Callback());
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    ticket_ = ticket.value_or(0);
    clock_.WaitUntilAsleep(2);
    return *answers_.back();
  }

  std::pair<int64_t, int64_t> NumBatches() const {
    return {engines_[0].num_batches(), engines_[1].num_batches()};
  }

  FakeClock clock_;
  Metrics metrics_{Metrics::Options{.heads = {"default"}, .version = "test", .commit = "test"}};
  DeviceTurns turns_{{{.lanes = {{.devices = {"gpu0"}}}}, {.lanes = {{.devices = {"gpu0"}}}}}};
  FakeEngine engines_[2];
  std::vector<std::unique_ptr<Answer>> answers_;
  std::shared_ptr<Batcher> batchers_[2];
  RequestTicket ticket_ = 0;
};

TEST_F(BatcherTurnsTest, ASingleHeadHasTwoBatchesInFlight) {
  Submit(0);
  Submit(0);

  EXPECT_EQ(NumBatches(), std::pair(2L, 0L));
}

// Regression: the time of the engine included waking other heads and copying the scores.
TEST_F(BatcherTurnsTest, TheTimeOfTheEngineEndsWhenItIsDone) {
  ScoreRequest request = RequestOfRows(1);
  request.trace = true;
  Answer answer;
  ASSERT_TRUE(batchers_[0]->Submit(std::move(request), answer.Callback()).ok());
  clock_.WaitUntilAsleep(2);
  Submit(0);
  batchers_[1].reset();
  const absl::Time begin = clock_.Now();
  turns_.SetWake(1, [this] { clock_.Advance(absl::Seconds(5)); });
  ASSERT_EQ(turns_.Take(1, {0}), std::nullopt);  // is woken when the first batch is done

  engines_[0].ReleaseOne();

  ASSERT_TRUE(answer.Wait().ok());
  EXPECT_EQ(answer.Wait()->times.last_end, begin);
  EXPECT_EQ(answer.Wait()->stages.engine, 0);
  EXPECT_EQ(answer.Wait()->stages.total, 5);
  turns_.SetWake(1, nullptr);
}

TEST_F(BatcherTurnsTest, AHeadThatWaitsGetsTheNextTurn) {
  Submit(0);
  Submit(0);
  Answer& waiting = Submit(1);
  Submit(0);
  EXPECT_EQ(NumBatches(), std::pair(2L, 0L));

  engines_[0].ReleaseOne();

  engines_[1].WaitForBatches(1);
  clock_.WaitUntilAsleep(2);
  EXPECT_EQ(NumBatches(), std::pair(2L, 1L));
  engines_[1].ReleaseOne();
  EXPECT_TRUE(waiting.Wait().ok());
  engines_[0].WaitForBatches(3);
}

TEST_F(BatcherTurnsTest, AHeadWhoseRequestIsCancelledWhileItWaitsLetsTheOtherContinue) {
  Submit(0);
  Submit(0);
  Answer& cancelled = Submit(1);
  const RequestTicket ticket = ticket_;
  Submit(0);

  batchers_[1]->Cancel(ticket);
  EXPECT_EQ(cancelled.WaitForCode(), absl::StatusCode::kCancelled);
  clock_.WaitUntilAsleep(2);
  engines_[0].ReleaseOne();

  engines_[0].WaitForBatches(3);
  EXPECT_EQ(engines_[1].num_batches(), 0);
}

TEST_F(BatcherTurnsTest, AHeadWhoseEngineFailsWhileItWaitsLetsTheOtherContinue) {
  Submit(0);
  Submit(0);
  Answer& lost = Submit(1);
  Submit(0);

  engines_[1].SetHealthy(false);
  engines_[0].ReleaseOne();  // Wakes the head whose turn it is.

  EXPECT_EQ(lost.WaitForCode(), absl::StatusCode::kUnavailable);
  engines_[0].WaitForBatches(3);
}

TEST_F(BatcherTurnsTest, ABatchThatFailsReturnsItsTurn) {
  Submit(0);
  Submit(0);
  Submit(1);
  engines_[0].FailNext(absl::InternalError("device lost"));
  engines_[0].SetHealthy(false);

  engines_[0].ReleaseOne();

  engines_[1].WaitForBatches(1);
}

TEST_F(BatcherTurnsTest, ABatcherThatStopsWhileItWaitsLetsTheOtherContinue) {
  Submit(0);
  Submit(0);
  Answer& dropped = Submit(1);
  Submit(0);

  batchers_[1] = nullptr;

  EXPECT_EQ(dropped.WaitForCode(), absl::StatusCode::kUnavailable);
  engines_[0].ReleaseOne();
  engines_[0].WaitForBatches(3);
}

TEST_F(BatcherTurnsTest, ABatchInHalvesKeepsItsTurn) {
  engines_[0].SetFittingRows(1);
  answers_.push_back(std::make_unique<Answer>());
  Answer& halved = *answers_.back();
  ASSERT_TRUE(batchers_[0]->Submit(RequestOfRows(2), halved.Callback()).ok());
  clock_.WaitUntilAsleep(2);
  Submit(0);
  Submit(1);

  engines_[0].ReleaseOne();  // The batch does not fit.
  clock_.WaitUntilAsleep(2);
  engines_[0].WaitForBatches(3);

  EXPECT_EQ(engines_[1].num_batches(), 0);
  engines_[0].Release();
  EXPECT_TRUE(halved.Wait().ok());
  engines_[1].WaitForBatches(1);
}

/// A head with two replicas and two versions, of which the first is live. The second version is
/// committed while the batch thread takes a turn for the replica on gpu1, in the call WakeBusyOne.
class BatcherTurnsCommitTest : public ::testing::Test {
 protected:
  BatcherTurnsCommitTest() {
    Batcher::Options options;
    options.batch_wait_max = absl::ZeroDuration();
    options.turns = &turns_;
    for (const uint64_t version : {1, 2}) {
      std::vector<ScoringEngine*> replicas;
      for (int replica = 0; replica < 2; ++replica) {
        engines_.push_back(
            std::make_unique<FakeEngine>(FakeEngine::Options{.weights_version = version}));
        replicas.push_back(engines_.back().get());
      }
      versions_.push_back(*VersionReplicas::Create(options, replicas));
    }
    Busy().Hold();
    batcher_ = *Batcher::Create(options, *versions_[0], clock_, metrics_);
  }

  ~BatcherTurnsCommitTest() override {
    turns_.SetWake(1, nullptr);
    Busy().Release();
  }

  /// Returns the engine of version 1 on gpu1.
  FakeEngine& Busy() { return *engines_[1]; }

  void Submit(size_t answer, uint64_t version = 0) {
    ScoreRequest request = RequestOfRows(1);
    request.weights_version = version;
    EXPECT_TRUE(batcher_->Submit(std::move(request), answers_[answer].Callback()).ok());
  }

  /// Puts the requests 0 and 1 in flight on gpu1, and lets request 2 wait for a turn.
  void LetARequestWaitForATurn() {
    // The replica on gpu0 and gpu2 must wait for gpu2. Meanwhile gpu0 is kept for it and is not
    // given to the second head, which has received more work.
    ASSERT_TRUE(turns_.Take(2, {0}).has_value() && turns_.Take(2, {0}).has_value());
    ASSERT_TRUE(turns_.Take(1, {0}).has_value());
    turns_.Charge(1, 1'000'000);
    turns_.GiveBack(1, 0);
    for (size_t i = 0; i < 3; ++i) {
      Submit(i);
      clock_.WaitUntilAsleep();
    }
    ASSERT_EQ(Busy().num_batches(), 2);
    ASSERT_FALSE(turns_.Take(1, {0}).has_value());
  }

  /// Ends a batch on gpu1, so that the head takes its turn there and no longer waits for gpu0.
  /// `committed` runs inside the batch thread's Take, after the commit of version 2.
  void CommitInsideTake(const std::function<void()>& committed) {
    turns_.SetWake(1, [this, committed] {
      batcher_->Commit(versions_[1].get());
      committed();
    });
    Busy().ReleaseOne();
    EXPECT_EQ(answers_[0].Wait()->weights_version, 1U);
    clock_.WaitUntilAsleep();
    turns_.SetWake(1, nullptr);
    Busy().Release();
    batcher_->AwaitRetired();
  }

  FakeClock clock_;
  Metrics metrics_{Metrics::Options{.heads = {"default"}, .version = "test", .commit = "test"}};
  DeviceTurns turns_{{{.lanes = {{.devices = {"gpu0", "gpu2"}}, {.devices = {"gpu1"}}}},
                      {.lanes = {{.devices = {"gpu0"}}}},
                      {.lanes = {{.devices = {"gpu2"}}}}}};
  std::vector<std::unique_ptr<FakeEngine>> engines_;
  std::vector<std::unique_ptr<VersionReplicas>> versions_;
  Answer answers_[4];
  std::shared_ptr<Batcher> batcher_;
};

// Regression: a Commit gave the queue to the next version while a turn was requested for the old
// one, and then the old engines, which might already be destroyed, scored the rows of the queue.
TEST_F(BatcherTurnsCommitTest, AVersionCommittedWhileATurnIsTakenScoresTheQueue) {
  LetARequestWaitForATurn();

  CommitInsideTake([this] { Submit(3, 2); });

  EXPECT_EQ(answers_[1].Wait()->weights_version, 1U);
  EXPECT_EQ(answers_[2].Wait()->weights_version, 2U);
  EXPECT_EQ(answers_[3].Wait()->weights_version, 2U);
}

TEST_F(BatcherTurnsCommitTest, ATurnThatACommitMakesUselessIsGivenBack) {
  LetARequestWaitForATurn();

  CommitInsideTake([] {});

  EXPECT_TRUE(answers_[2].Wait().ok());
  batcher_ = nullptr;
  // Both batches of gpu1 are free again.
  EXPECT_TRUE(turns_.Take(0, {1}).has_value());
  EXPECT_TRUE(turns_.Take(0, {1}).has_value());
}

/// Uses three heads with different batch sizes on two devices. A thread per head submits requests
/// without pause, and one head fails during the test.
TEST(BatcherTurnsStressTest, EndsEveryRequestOfEveryHeadAndReturnsAllTurns) {
  constexpr int kHeads = 3;
  constexpr uint32_t kRequests = 600;
  Metrics metrics({.heads = {"default"}, .version = "test", .commit = "test"});
  DeviceTurns turns({{.lanes = {{.devices = {"gpu0"}}, {.devices = {"gpu1"}}}},
                     {.lanes = {{.devices = {"gpu0", "gpu1"}, .waits_for_peers = true}}},
                     {.lanes = {{.devices = {"gpu1", "gpu0"}, .waits_for_peers = true}}}});
  std::vector<std::vector<std::unique_ptr<FakeEngine>>> engines(kHeads);
  std::vector<std::shared_ptr<Batcher>> batchers;
  for (int head = 0; head < kHeads; ++head) {
    std::vector<ScoringEngine*> replicas;
    for (int replica = 0; replica < (head == 0 ? 2 : 1); ++replica) {
      engines[static_cast<size_t>(head)].push_back(
          std::make_unique<FakeEngine>(FakeEngine::Options{.batch_rows_max = 64, .record = false}));
      replicas.push_back(engines[static_cast<size_t>(head)].back().get());
    }
    Batcher::Options options;
    options.batch_rows_max = 16 << head;
    options.batch_wait_max = absl::Microseconds(20);
    options.turns = &turns;
    options.turns_head = head;
    auto batcher = BatcherOn(replicas, options, Clock::Steady(), metrics);
    ASSERT_TRUE(batcher.ok()) << batcher.status();
    batchers.push_back(*std::move(batcher));
  }
  std::atomic<int> admitted = 0;
  std::atomic<int> answered = 0;
  std::atomic<int> succeeded = 0;

  std::vector<std::thread> threads;
  for (size_t head = 0; head < kHeads; ++head) {
    threads.emplace_back([&, head] {
      std::mt19937 random(static_cast<uint32_t>(head));
      std::vector<RequestTicket> tickets;
      for (uint32_t i = 0; i < kRequests; ++i) {
        RequestSpec spec{.rows = static_cast<int32_t>(random() % 80), .seed = i};
        if (random() % 10 == 0) {
          spec.deadline = Clock::Steady().Now() + absl::Microseconds(random() % 2'000);
        }
        const auto ticket =
            batchers[head]->Submit(MakeRequest(spec), [&](absl::StatusOr<ScoreResult> result) {
              ++answered;
              succeeded += result.ok() ? 1 : 0;
            });
        if (ticket.ok()) {
          ++admitted;
          tickets.push_back(*ticket);
        }
        if (random() % 8 == 0 && !tickets.empty()) {
          batchers[head]->Cancel(tickets[random() % tickets.size()]);
        }
        if (random() % 50 == 0) {
          engines[head].front()->FailNext(absl::ResourceExhaustedError("memory"));
        }
        if (head == 2 && i == kRequests / 2) {
          engines[head].front()->SetHealthy(false);
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::shared_ptr<Batcher>& batcher : batchers) {
    EXPECT_TRUE(batcher->Drain(absl::InfiniteFuture()));
  }
  EXPECT_EQ(answered, admitted);
  EXPECT_GT(succeeded, 0);
  batchers.clear();

  // All devices are free again: each replica can have both of its batches in flight.
  for (int head = 0; head < kHeads; ++head) {
    for (int replica = 0; replica < (head == 0 ? 2 : 1); ++replica) {
      EXPECT_TRUE(turns.Take(head, {replica}).has_value()) << head << " " << replica;
      EXPECT_TRUE(turns.Take(head, {replica}).has_value()) << head << " " << replica;
      turns.GiveBack(head, replica);
      turns.GiveBack(head, replica);
    }
  }
}

}  // namespace
}  // namespace logprobd::testing
