// Requests in the two stages at which no fake engine can hold them: while their payload is copied,
// and while they are answered. The Batcher reads its clock just before it copies, without a lock,
// so a fake clock lets tests act at that point.

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "server/batching/batch_slot.h"
#include "server/batching/device_turns.h"
#include "tests/support/batcher_on.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

/// A clock that calls a function at one of its next readings.
class HookedClock final : public Clock {
 public:
  absl::Time Now() const override {
    if (readings_left_ > 0 && --readings_left_ == 0) {
      hook_();
    }
    return clock_.Now();
  }
  bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition,
                  absl::Time until) const override {
    return clock_.AwaitUntil(mutex, condition, until);
  }

  void WaitUntilAsleep() const { clock_.WaitUntilAsleep(); }

  /// Waits until the thread that uses the clock sleeps. Then calls `hook` just before the next
  /// request's payload is copied: the clock is read at Submit, before the cut and before the copy.
  void CallAtNextCopy(std::function<void()> hook) { CallAtReading(3, std::move(hook)); }

  /// As CallAtNextCopy, for the copy of that request's second batch. The clock is read at Submit,
  /// five times for the first batch, before the cut and before the copy.
  void CallAtSecondCopy(std::function<void()> hook) { CallAtReading(8, std::move(hook)); }

  /// As CallAtNextCopy, for a head that shares devices. The clock is also read after the turn was
  /// taken.
  void CallAtNextCopyInTurn(std::function<void()> hook) { CallAtReading(4, std::move(hook)); }

  /// Makes the copy of the first batch of the next request take `time`.
  void DelayNextCopy(absl::Duration time) {
    CallAtReading(4, [this, time] { clock_.Advance(time); });
  }

 private:
  void CallAtReading(int reading, std::function<void()> hook) {
    clock_.WaitUntilAsleep();
    hook_ = std::move(hook);
    readings_left_ = reading;
  }

  FakeClock clock_;
  std::function<void()> hook_;
  mutable std::atomic<int> readings_left_ = 0;
};

class BatcherStageTest : public ::testing::Test {
 protected:
  void MakeBatcher(const Batcher::Options& options) {
    auto batcher = BatcherOn({&engine_}, options, clock_, metrics_);
    ASSERT_TRUE(batcher.ok()) << batcher.status();
    batcher_ = *std::move(batcher);
  }

  Metrics metrics_{Metrics::Options{.heads = {"default"}, .version = "test", .commit = "test"}};
  HookedClock clock_;
  FakeEngine engine_;
  std::shared_ptr<Batcher> batcher_;
};

TEST_F(BatcherStageTest, DropsARequestThatIsCancelledWhileItIsCopied) {
  MakeBatcher({});
  ScoreRequest request = RequestOfRows(5);
  const std::weak_ptr<void> payload = request.hidden.owner;
  std::atomic<RequestTicket> ticket = 0;
  bool was_held = false;
  clock_.CallAtNextCopy([&] {
    while (ticket == 0) {  // Submit is about to return it.
    }
    batcher_->Cancel(ticket);
    was_held = !payload.expired();  // The copy still reads it.
  });
  Answer answer;

  ticket = batcher_->Submit(std::move(request), answer.Callback()).value_or(1);

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  EXPECT_TRUE(was_held);
  EXPECT_TRUE(payload.expired());
  EXPECT_EQ(engine_.num_batches(), 0);
}

TEST_F(BatcherStageTest, ScoresTheOtherRequestsOfABatchWhenOneIsCancelledDuringTheCopy) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  Answer occupant;
  engine_.Hold();
  ASSERT_TRUE(batcher_->Submit(RequestOfRows(1), occupant.Callback()).ok());
  engine_.WaitUntilInFlight(1);
  std::atomic<RequestTicket> ticket = 0;
  clock_.CallAtNextCopy([&] {
    while (ticket == 0) {
    }
    batcher_->Cancel(ticket);
  });
  Answer cut;

  // The request needs two batches and is cancelled while the first one is copied.
  ticket = batcher_->Submit(RequestOfRows(10'000), cut.Callback()).value_or(1);
  EXPECT_EQ(cut.WaitForCode(), absl::StatusCode::kCancelled);
  Answer other;
  ASSERT_TRUE(batcher_->Submit(RequestOfRows(2), other.Callback()).ok());
  engine_.Release();

  EXPECT_TRUE(other.Wait().ok());
  EXPECT_TRUE(occupant.Wait().ok());
}

TEST_F(BatcherStageTest, ReleasesTheWholeChargeOfARequestThatFailsWhileItsNextBatchIsCopied) {
  // The 72 + 24 bytes of a request of two rows.
  MakeBatcher({.batch_rows_max = 1, .queue_bytes_max = 96, .client_share_max = 1});
  engine_.Hold();
  clock_.CallAtSecondCopy([&] {
    engine_.FailNext(absl::InternalError("fault"));
    engine_.ReleaseOne();
    engine_.WaitUntilIdle();
  });
  Answer answer;
  ASSERT_TRUE(batcher_->Submit(RequestOfRows(2), answer.Callback()).ok());
  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kInternal);
  clock_.WaitUntilAsleep();
  EXPECT_EQ(engine_.num_batches(), 1);  // The second one was dropped.
  engine_.Release();

  Answer next;
  const auto ticket = batcher_->Submit(RequestOfRows(2), next.Callback());

  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_TRUE(next.Wait().ok());
}

TEST_F(BatcherStageTest, ReportsTheLongestCopyOfARequest) {
  MakeBatcher({.batch_rows_max = 1});
  clock_.DelayNextCopy(absl::Seconds(2));
  Answer answer;

  ASSERT_TRUE(batcher_->Submit(RequestOfRows(2), answer.Callback()).ok());

  ASSERT_TRUE(answer.Wait().ok()) << answer.Wait().status();
  EXPECT_EQ(answer.Wait()->stages.copy, 2);
}

TEST_F(BatcherStageTest, ReturnsTheTurnOfABatchThatIsDropped) {
  DeviceTurns turns({{.lanes = {{.devices = {"gpu0"}}}}});
  MakeBatcher({.turns = &turns});
  std::atomic<RequestTicket> ticket = 0;
  clock_.CallAtNextCopyInTurn([&] {
    while (ticket == 0) {
    }
    batcher_->Cancel(ticket);
  });
  Answer answer;

  ticket = batcher_->Submit(RequestOfRows(1), answer.Callback()).value_or(1);
  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kCancelled);
  batcher_ = nullptr;

  EXPECT_EQ(engine_.num_batches(), 0);
  EXPECT_TRUE(turns.Take(0, {0}).has_value());
  EXPECT_TRUE(turns.Take(0, {0}).has_value());
}

TEST_F(BatcherStageTest, StartsNothingOnAnEngineThatFailsDuringTheCopy) {
  MakeBatcher({});
  clock_.CallAtNextCopy([&] { engine_.SetHealthy(false); });
  Answer answer;

  ASSERT_TRUE(batcher_->Submit(RequestOfRows(1), answer.Callback()).ok());

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_.num_batches(), 0);
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
}

TEST_F(BatcherStageTest, IgnoresACancelWhileTheRequestIsAnswered) {
  MakeBatcher({});
  std::atomic<RequestTicket> ticket = 0;
  Answer answer;

  ticket = batcher_
               ->Submit(RequestOfRows(1),
                        [&, done = answer.Callback()](absl::StatusOr<ScoreResult> result) mutable {
                          while (ticket == 0) {
                          }
                          batcher_->Cancel(ticket);
                          std::move(done)(std::move(result));
                        })
               .value_or(1);

  EXPECT_TRUE(answer.Wait().ok());
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
}

// Regression: requests without rows to score kept their payloads until the batch thread ran and did
// not count towards the limits.
TEST_F(BatcherStageTest, ChargesRequestsWithoutRowsThatWaitForTheBatchThread) {
  MakeBatcher({.queue_requests_max = 3, .client_share_max = 1});
  Answer empty;
  Answer ignored;
  absl::Status refusal;
  clock_.CallAtNextCopy([&] {
    EXPECT_TRUE(batcher_->Submit(MakeRequest({.rows = 0}), empty.Callback()).ok());
    EXPECT_TRUE(
        batcher_->Submit(MakeRequest({.rows = 1, .ignored_rows = {0}}), ignored.Callback()).ok());
    refusal = batcher_->Submit(MakeRequest({.rows = 0}), [](auto) {}).status();
  });
  Answer first;

  ASSERT_TRUE(batcher_->Submit(RequestOfRows(1), first.Callback()).ok());

  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(empty.Wait().ok());
  EXPECT_TRUE(ignored.Wait().ok());
  EXPECT_EQ(RejectionOf(refusal), Rejection::kQueueRequests);
  EXPECT_TRUE(batcher_->Submit(MakeRequest({.rows = 0}), [](auto) {}).ok());
}

TEST(BatchSlotTest, FreesArraysThatAnUnusualBatchMadeLarge) {
  FakeEngine engine;
  auto staging = engine.AllocateStaging(1'024);
  ASSERT_TRUE(staging.ok());
  BatchSlot slot(*std::move(staging));
  auto pending = std::make_shared<PendingRequest>();
  pending->request = MakeRequest({.rows = 1, .candidate_counts = {1 << 20}});
  slot.Fill({BatchPart{.pending = pending, .row_end = 1, .num_rows = 1}}, 4);
  EXPECT_GT(slot.array_bytes(), 12 << 20);

  slot.ReleaseLargeArrays();

  EXPECT_LT(slot.array_bytes(), BatchSlot::kKeptArrayBytes);
}

}  // namespace
}  // namespace logprobd::testing
