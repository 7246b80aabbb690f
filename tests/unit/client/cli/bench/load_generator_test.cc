#include "client/cli/bench/load_generator.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_scoring_service.h"

namespace logprobd::client {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// A clock whose time advances only in SleepUntil and Advance.
class FakeLoadClock final : public LoadClock {
 public:
  absl::Time Now() const override {
    absl::MutexLock lock(&mutex_);
    return now_;
  }
  void SleepUntil(absl::Time time) override {
    absl::MutexLock lock(&mutex_);
    now_ = std::max(now_, time);
  }
  void Advance(absl::Duration duration) { SleepUntil(Now() + duration); }

 private:
  mutable absl::Mutex mutex_;
  absl::Time now_ ABSL_GUARDED_BY(mutex_) = absl::UnixEpoch();
};

/// Answers within Send, after `service_time` of the fake clock, and records the requests.
class FakeTarget final : public LoadTarget {
 public:
  explicit FakeTarget(FakeLoadClock& clock) : clock_(clock) {}

  void Send(const ScoreArgs& args, ScoreCallback done) override {
    sent_at.push_back(clock_.Now() - absl::UnixEpoch());
    rows.push_back(args.rows);
    hidden.emplace_back(reinterpret_cast<const char*>(args.hidden.data()), args.hidden.size());
    targets.emplace_back(args.targets.begin(), args.targets.end());
    clock_.Advance(service_time);
    if (!status.ok()) {
      std::move(done)(status);
      return;
    }
    ScoreResult result;
    result.rows = args.rows;
    std::move(done)(std::move(result));
  }

  absl::Duration service_time = absl::ZeroDuration();
  absl::Status status;
  std::vector<absl::Duration> sent_at;
  std::vector<int64_t> rows;
  std::vector<std::string> hidden;
  std::vector<std::vector<int32_t>> targets;

 private:
  FakeLoadClock& clock_;
};

Head FakeHead() {
  Head head;
  head.name = "fake";
  head.hidden_size = 8;
  head.vocab_size = 100;
  return head;
}

/// Runs loads with one writer and a target that answers within Send, so that the order is fixed.
class PlannedLoadTest : public ::testing::Test {
 protected:
  LoadMeasurement Run(LoadPlan plan) {
    plan.writers = 1;
    const RowPool pool = *RowPool::Create(FakeHead(), Dtype::kBf16, plan.mix.rows_max(), 1);
    absl::StatusOr<LoadMeasurement> measurement = RunLoad(
        {.target = target_, .pool = pool, .request = {}, .observer = observer_, .clock = clock_},
        plan);
    EXPECT_TRUE(measurement.ok()) << measurement.status();
    return *std::move(measurement);
  }

  FakeLoadClock clock_;
  FakeTarget target_{clock_};
  LoadObserver observer_;
};

TEST_F(PlannedLoadTest, SendsAtFixedTimes) {
  Run({.request_rate = 100, .arrivals = Arrivals::kFixed, .requests = 4});

  EXPECT_THAT(target_.sent_at, ElementsAre(absl::ZeroDuration(), absl::Milliseconds(10),
                                           absl::Milliseconds(20), absl::Milliseconds(30)));
}

TEST_F(PlannedLoadTest, CountsLatencyFromThePlannedTime) {
  target_.service_time = absl::Milliseconds(25);

  const LoadMeasurement found =
      Run({.request_rate = 100, .arrivals = Arrivals::kFixed, .requests = 3});

  // Requests are due at 0, 10 and 20 ms, sent at 0, 25 and 50 ms, answered at 25, 50 and 75 ms.
  const LatencyHistogram latency = found.measured.Total().latency;
  EXPECT_DOUBLE_EQ(latency.max(), 0.055);
  EXPECT_NEAR(latency.mean(), 0.040, 1e-12);
}

TEST_F(PlannedLoadTest, CountsSendsThatAreLateBecauseOfTheGenerator) {
  target_.service_time = absl::Milliseconds(25);  // the generator spends this time in Send

  const LoadMeasurement found =
      Run({.request_rate = 100, .arrivals = Arrivals::kFixed, .requests = 3});

  EXPECT_EQ(found.measured.late.by_generator, 2);
  EXPECT_EQ(found.measured.late.by_server, 0);
  EXPECT_DOUBLE_EQ(found.measured.late.generator_seconds_max, 0.030);
}

TEST_F(PlannedLoadTest, ToleratesAMillisecondOfLateness) {
  target_.service_time = absl::Milliseconds(11);

  const LoadMeasurement found =
      Run({.request_rate = 100, .arrivals = Arrivals::kFixed, .requests = 2});

  EXPECT_EQ(found.measured.late.by_generator, 0);
}

TEST_F(PlannedLoadTest, EndsWithItsDuration) {
  const LoadMeasurement found =
      Run({.request_rate = 100, .arrivals = Arrivals::kFixed, .duration = absl::Milliseconds(95)});

  EXPECT_EQ(found.measured.Total().requests(), 10);  // at 0, 10, ... 90 ms
}

TEST_F(PlannedLoadTest, EndsInTimeWhenItIsBehindAndCountsUnsentRequests) {
  target_.service_time = absl::Milliseconds(40);

  const LoadMeasurement found =
      Run({.request_rate = 100, .arrivals = Arrivals::kFixed, .duration = absl::Milliseconds(95)});

  EXPECT_EQ(found.measured.Total().requests(), 3);  // at 0, 40 and 80 ms
  EXPECT_EQ(found.measured.late.unsent, 7);
}

TEST_F(PlannedLoadTest, SendsOneRequestAfterTheOtherInAClosedLoop) {
  target_.service_time = absl::Milliseconds(5);

  const LoadMeasurement found = Run({.requests = 4});

  EXPECT_THAT(target_.sent_at, ElementsAre(absl::ZeroDuration(), absl::Milliseconds(5),
                                           absl::Milliseconds(10), absl::Milliseconds(15)));
  EXPECT_DOUBLE_EQ(found.measured.Total().latency.max(), 0.005);
  EXPECT_DOUBLE_EQ(found.measured.seconds, 0.020);
  EXPECT_EQ(found.measured.PerSecond(found.measured.Total().rows), 200);
}

TEST_F(PlannedLoadTest, WarmsUpWithoutCountingTheRequests) {
  const LoadMeasurement found =
      Run({.request_rate = 100, .arrivals = Arrivals::kFixed, .requests = 2, .warmup_requests = 3});

  EXPECT_EQ(target_.sent_at.size(), 3 + 2U);
  EXPECT_EQ(found.measured.Total().requests(), 2);
}

TEST_F(PlannedLoadTest, SendsTheSameBytesUnlessRowsAreFresh) {
  Run({.mix = {.sizes = {{.rows = 3}}}, .requests = 3});

  EXPECT_THAT(target_.hidden, Each(target_.hidden[0]));
}

TEST_F(PlannedLoadTest, WritesFreshRowsWithTheirTargets) {
  Run({.mix = {.sizes = {{.rows = 3}}}, .fresh = true, .requests = 20});

  const std::set<std::string> different(target_.hidden.begin(), target_.hidden.end());
  EXPECT_EQ(different.size(), 20U);
  // A row that is sent twice has the same target both times.
  std::map<std::string, int32_t> target_of;
  for (size_t i = 0; i < target_.hidden.size(); ++i) {
    for (size_t row = 0; row < 3; ++row) {
      const auto [found, is_new] =
          target_of.emplace(target_.hidden[i].substr(row * 16, 16), target_.targets[i][row]);
      EXPECT_EQ(found->second, target_.targets[i][row]);
    }
  }
}

TEST_F(PlannedLoadTest, ReportsTheSizesOfAMixSeparately) {
  const LoadMeasurement found = Run(
      {.mix = {.sizes = {{.rows = 1, .weight = 3}, {.rows = 16, .weight = 1}}}, .requests = 200});

  const int64_t large = std::count(target_.rows.begin(), target_.rows.end(), 16);
  EXPECT_GT(large, 20);
  EXPECT_LT(large, 90);
  ASSERT_EQ(found.measured.sizes.size(), 2U);
  EXPECT_EQ(found.measured.sizes[0].requests(), 200 - large);
  EXPECT_EQ(found.measured.sizes[1].requests(), large);
  EXPECT_EQ(found.measured.sizes[1].rows, 16 * large);
}

TEST_F(PlannedLoadTest, CountsErrorsSeparately) {
  target_.status = absl::ResourceExhaustedError("full");

  const LoadMeasurement found = Run({.requests = 10});

  EXPECT_EQ(found.measured.Total().requests(), 0);
  EXPECT_EQ(found.measured.Total().errors, 10);
  EXPECT_EQ(found.measured.first_error, absl::ResourceExhaustedError("full"));
}

/// Keeps requests until the test lets it answer.
class HoldingTarget final : public LoadTarget {
 public:
  ~HoldingTarget() override { AnswerAll(); }

  void Send(const ScoreArgs& /*args*/, ScoreCallback done) override {
    absl::MutexLock lock(&mutex_);
    held_.push_back(std::move(done));
    held_max_ = std::max(held_max_, held_.size());
  }

  void AwaitHeld(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto is_reached = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return held_.size() >= count;
    };
    mutex_.Await(absl::Condition(&is_reached));
  }

  void AnswerAll() {
    std::deque<ScoreCallback> held;
    {
      absl::MutexLock lock(&mutex_);
      held.swap(held_);
    }
    for (ScoreCallback& done : held) std::move(done)(ScoreResult{});
  }

  size_t held_max() const {
    absl::MutexLock lock(&mutex_);
    return held_max_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::deque<ScoreCallback> held_ ABSL_GUARDED_BY(mutex_);
  size_t held_max_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST(InflightTest, AnOpenLoopKeepsItsBoundAndCountsSendsThatAreLateBecauseOfTheServer) {
  HoldingTarget target;
  LoadObserver observer;
  FakeLoadClock clock;
  const RowPool pool = *RowPool::Create(FakeHead(), Dtype::kBf16, 1, 1);
  std::atomic<bool> is_done{false};
  std::thread server([&] {
    target.AwaitHeld(3);
    clock.Advance(absl::Seconds(1));
    while (!is_done.load()) {
      target.AnswerAll();
      std::this_thread::yield();
    }
  });

  const absl::StatusOr<LoadMeasurement> found =
      RunLoad({.target = target, .pool = pool, .request = {}, .observer = observer, .clock = clock},
              {.request_rate = 1'000,
               .arrivals = Arrivals::kFixed,
               .inflight_max = 3,
               .writers = 1,
               .requests = 10});
  is_done.store(true);
  server.join();

  ASSERT_TRUE(found.ok());
  EXPECT_EQ(target.held_max(), 3U);
  EXPECT_EQ(found->inflight_max, 3);
  EXPECT_EQ(found->measured.Total().requests(), 10);
  EXPECT_GE(found->measured.late.by_server, 1);
  EXPECT_EQ(found->measured.late.by_generator, 0);
}

/// Counts blocking and non-blocking calls, and answers at once.
class CountingTarget final : public LoadTarget {
 public:
  void Send(const ScoreArgs& /*args*/, ScoreCallback done) override {
    ++sent;
    std::move(done)(ScoreResult{});
  }
  void SendAndWait(const ScoreArgs& /*args*/, ScoreCallback done) override {
    ++waited;
    std::move(done)(ScoreResult{});
  }

  std::atomic<int> sent{0};
  std::atomic<int> waited{0};
};

TEST(LoadTargetTest, AClosedLoopWithAThreadPerRequestMakesBlockingCalls) {
  LoadObserver observer;
  FakeLoadClock clock;
  const RowPool pool = *RowPool::Create(FakeHead(), Dtype::kBf16, 1, 1);
  const auto run = [&](const LoadPlan& plan) {
    CountingTarget target;
    const absl::StatusOr<LoadMeasurement> found = RunLoad(
        {.target = target, .pool = pool, .request = {}, .observer = observer, .clock = clock},
        plan);
    EXPECT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(target.sent + target.waited, 10);
    return target.waited.load();
  };

  EXPECT_EQ(run({.concurrency = 1, .requests = 10}), 10);
  EXPECT_EQ(run({.concurrency = 2, .writers = 1, .requests = 10}), 0);
  EXPECT_EQ(run({.request_rate = 1'000, .inflight_max = 1, .writers = 1, .requests = 10}), 0);
}

TEST(InflightTest, ALowRateIsAnOpenLoopToo) {
  LoadObserver observer;
  FakeLoadClock clock;
  FakeTarget target(clock);
  const RowPool pool = *RowPool::Create(FakeHead(), Dtype::kF32, 8, 1);

  const absl::StatusOr<LoadMeasurement> found =
      RunLoad({.target = target, .pool = pool, .request = {}, .observer = observer, .clock = clock},
              {.mix = {.sizes = {{.rows = 1}}},
               .concurrency = 3,
               .request_rate = 0.5,
               .inflight_max = 7,
               .writers = 1,
               .requests = 1});

  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->inflight_max, 7);
}

TEST(InflightTest, FreshRowsBoundTheirMemory) {
  LoadObserver observer;
  FakeLoadClock clock;
  FakeTarget target(clock);
  Head head = FakeHead();
  head.hidden_size = 1 << 20;
  const RowPool pool = *RowPool::Create(head, Dtype::kF32, 8, 1);

  const absl::StatusOr<LoadMeasurement> found =
      RunLoad({.target = target, .pool = pool, .request = {}, .observer = observer, .clock = clock},
              {.mix = {.sizes = {{.rows = 8}}},
               .request_rate = 1'000,
               .writers = 1,
               .fresh = true,
               .requests = 1});

  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->inflight_max, 32);  // 1 GiB of requests of 32 MiB
}

/// Counts the events of a run.
class CountingObserver final : public LoadObserver {
 public:
  void MeasureBegins() override { events.emplace_back("begins"); }
  void MeasureEnds() override { events.emplace_back("ends"); }
  void Progress(double share) override {
    EXPECT_GE(share, 0);
    EXPECT_LE(share, 1);
    shares.push_back(share);
  }
  void Answered(int64_t first, int64_t rows, const ScoreResult& result) override {
    EXPECT_EQ(result.rows, rows);
    EXPECT_GE(first, 0);
    rows_answered.fetch_add(rows);
  }

  std::vector<std::string> events;
  std::vector<double> shares;
  std::atomic<int64_t> rows_answered{0};
};

/// Runs against a fake server over loopback, in real time.
class LoadGeneratorTest : public ::testing::Test {
 protected:
  LoadGeneratorTest() {
    client_ = *Client::Create({.address = server_.address(),
                               .channels = 1,
                               .attempts_max = 1,
                               .overloaded_attempts_max = 1});
    server_.SetServing(true);
    // Connects first, so that the runs contain no retries on a busy machine.
    EXPECT_TRUE(client_->WaitReady(absl::Seconds(30)).ok());
  }

  LoadMeasurement Run(const LoadPlan& plan) {
    ClientTarget target(*client_);
    const RowPool pool = *RowPool::Create(FakeHead(), Dtype::kBf16, plan.mix.rows_max(), 1);
    ScoreArgs request;
    request.head = "fake";
    return *RunLoad({.target = target, .pool = pool, .request = request, .observer = observer_},
                    plan);
  }

  testing::FakeScoringServer server_;
  std::unique_ptr<Client> client_;
  CountingObserver observer_;
};

TEST_F(LoadGeneratorTest, SendsTheRequestedNumberOfRequestsAndTheWarmUp) {
  const LoadMeasurement found = Run(
      {.mix = {.sizes = {{.rows = 4}}}, .concurrency = 3, .requests = 50, .warmup_requests = 5});

  EXPECT_EQ(found.measured.Total().requests(), 50);
  EXPECT_EQ(found.measured.Total().errors, 0);
  EXPECT_EQ(found.measured.Total().rows, 200);
  EXPECT_GT(found.measured.Total().latency.Percentile(0), 0);
  EXPECT_EQ(server_.service().requests().size(), 55U);
  EXPECT_EQ(observer_.rows_answered.load(), 220);
  EXPECT_THAT(observer_.events, ElementsAre("begins", "ends"));
}

TEST_F(LoadGeneratorTest, RunsForADuration) {
  const LoadMeasurement found = Run({.concurrency = 2, .duration = absl::Milliseconds(20)});

  EXPECT_GT(found.measured.Total().requests(), 0);
  EXPECT_GE(found.measured.seconds, 0.02);
}

TEST_F(LoadGeneratorTest, SendsAtARateWithoutWaitingForAnswers) {
  const LoadMeasurement found = Run({.request_rate = 5'000, .requests = 20});

  EXPECT_EQ(found.measured.Total().requests(), 20);
}

TEST_F(LoadGeneratorTest, EndsAfterThreeWindowsIfEveryRunCountsAsStable) {
  const LoadMeasurement found =
      Run({.window = absl::Milliseconds(20), .stability = {.share = 1e9}, .windows_max = 1'000});

  EXPECT_EQ(found.stable, true);
  EXPECT_EQ(found.windows.size(), 3U);
  EXPECT_GE(found.measured.seconds, 0.06);
  EXPECT_GT(found.measured.Total().requests(), 0);
}

TEST_F(LoadGeneratorTest, EndsAfterTheMaximumOfWindowsAndReportsTheLastThree) {
  const LoadMeasurement found =
      Run({.window = absl::Milliseconds(10), .stability = {.share = 1e-12}, .windows_max = 5});

  EXPECT_EQ(found.stable, false);
  EXPECT_EQ(found.windows.size(), 5U);
  ASSERT_THAT(observer_.shares, Not(IsEmpty()));
  EXPECT_GT(observer_.shares.back(), 0.9);
  // For requests in flight at the end, the latency is counted and the rows are not.
  EXPECT_GE(found.measured.Total().requests(),
            found.windows[2].requests + found.windows[3].requests + found.windows[4].requests);
  EXPECT_NEAR(static_cast<double>(found.measured.Total().rows),
              found.windows[2].rows_per_second * found.windows[2].seconds +
                  found.windows[3].rows_per_second * found.windows[3].seconds +
                  found.windows[4].rows_per_second * found.windows[4].seconds,
              1e-6);
}

TEST_F(LoadGeneratorTest, StopsAnOpenLoopOfALowRate) {
  const LoadMeasurement found = Run({.request_rate = 0.001,
                                     .arrivals = Arrivals::kFixed,
                                     .window = absl::Milliseconds(5),
                                     .windows_max = 3});

  EXPECT_EQ(found.windows.size(), 3U);
  EXPECT_EQ(found.stable, false);
}

TEST_F(LoadGeneratorTest, SharesTheWorkOfSeveralWriters) {
  const LoadMeasurement found = Run({.mix = {.sizes = {{.rows = 16}}},
                                     .concurrency = 8,
                                     .writers = 4,
                                     .fresh = true,
                                     .requests = 400});

  EXPECT_EQ(found.measured.Total().requests(), 400);
  EXPECT_EQ(found.measured.Total().errors, 0) << found.measured.first_error;
}

TEST_F(LoadGeneratorTest, CountsErrorsOfTheServer) {
  server_.service().FailNext({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"});

  const LoadMeasurement found = Run({.requests = 10});

  EXPECT_EQ(found.measured.Total().requests(), 9);
  EXPECT_EQ(found.measured.Total().errors, 1);
  EXPECT_THAT(std::string(found.measured.first_error.message()), HasSubstr("full"));
}

}  // namespace
}  // namespace logprobd::client
