#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "server/batching/batcher.h"
#include "server/metrics/metrics.h"
#include "tests/support/batcher_on.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_engine.h"
#include "tests/support/test_requests.h"

namespace logprobd::testing {

/// The answer to one submitted request. Aborts when its callback is called twice.
class Answer {
 public:
  ScoreCallback Callback() {
    return [this](absl::StatusOr<ScoreResult> result) {
      absl::MutexLock lock(&mutex_);
      LOGPROBD_CHECK(!is_called_, "a callback was called twice");
      result_ = std::move(result);
      is_called_ = true;
    };
  }

  /// Blocks until the callback has been called. Aborts if that takes a minute of real time.
  const absl::StatusOr<ScoreResult>& Wait() const {
    absl::MutexLock lock(&mutex_);
    LOGPROBD_CHECK(mutex_.AwaitWithTimeout(absl::Condition(&is_called_), absl::Minutes(1)),
                   "no answer");
    return *result_;
  }
  absl::StatusCode WaitForCode() const { return Wait().status().code(); }

  bool is_called() const {
    absl::MutexLock lock(&mutex_);
    return is_called_;
  }

 private:
  mutable absl::Mutex mutex_;
  bool is_called_ = false;
  std::optional<absl::StatusOr<ScoreResult>> result_;
};

/// A Batcher on a fake clock and engine. Members are destroyed in the right order.
class BatcherTest : public ::testing::Test {
 protected:
  void MakeBatcher(const Batcher::Options& options = {}, const FakeEngine::Options& engine = {}) {
    engine_.emplace(engine);
    auto batcher = BatcherOn({&*engine_}, options, clock_, metrics_);
    ASSERT_TRUE(batcher.ok()) << batcher.status();
    batcher_ = *std::move(batcher);
  }

  void TearDown() override {
    if (engine_.has_value()) {
      engine_->Release();  // A Batcher's destructor waits for its batches.
    }
  }

  /// Submits a request; fails the test if it is refused.
  Answer& SubmitRequest(ScoreRequest request) {
    answers_.push_back(std::make_unique<Answer>());
    Answer& answer = *answers_.back();
    const auto ticket = batcher_->Submit(std::move(request), answer.Callback());
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    last_ticket_ = ticket.value_or(0);
    return answer;
  }
  Answer& SubmitRows(int64_t rows) { return SubmitRequest(RequestOfRows(rows)); }
  Answer& Submit(const RequestSpec& spec) { return SubmitRequest(MakeRequest(spec)); }

  /// Returns the error of Submit, or OK.
  absl::Status Refusal(const RequestSpec& spec) {
    answers_.push_back(std::make_unique<Answer>());
    return batcher_->Submit(MakeRequest(spec), answers_.back()->Callback()).status();
  }

  /// Puts one batch of one row in flight, which does not end until it is released.
  void OccupyEngine() {
    engine_->Hold();
    const int64_t before = engine_->num_batches();
    Submit(RequestSpec{.client_id = "occupant"});
    engine_->WaitForBatches(static_cast<int>(before) + 1);
    clock_.WaitUntilAsleep();
  }

  /// Occupies both slots of the engine, so that later requests stay in the queue.
  void OccupyBothSlots() {
    OccupyEngine();
    Submit(RequestSpec{.client_id = "occupant"});
    clock_.WaitUntilAsleep();
    clock_.Advance(absl::Seconds(1));  // Longer than any batch_wait_max used here.
    engine_->WaitUntilInFlight(2);
    clock_.WaitUntilAsleep();
  }

  std::vector<int64_t> BatchRows() const {
    std::vector<int64_t> rows;
    for (const RecordedBatch& batch : engine_->batches()) {
      rows.push_back(batch.num_rows);
    }
    return rows;
  }

  /// Returns the value of series name{labels} in the metrics text; -1 if it does not exist.
  double Metric(const std::string& series) const {
    const std::string text = absl::StrCat("\n", metrics_.Serialize());
    const size_t begin = text.find(absl::StrCat("\n", series, " "));
    return begin == std::string::npos ? -1 : std::stod(text.substr(begin + series.size() + 2));
  }

  FakeClock clock_;
  Metrics metrics_{Metrics::Options{.heads = {"default"}, .version = "test", .commit = "test"}};
  std::optional<FakeEngine> engine_;
  std::vector<std::unique_ptr<Answer>> answers_;
  std::shared_ptr<Batcher> batcher_;
  RequestTicket last_ticket_ = 0;
};

}  // namespace logprobd::testing
