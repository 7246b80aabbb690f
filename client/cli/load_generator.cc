#include "client/cli/load_generator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/random/distributions.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace logprobd::client {
namespace {

using Clock = std::chrono::steady_clock;

// An open loop beyond this is not a measurement any more.
constexpr int64_t kOpenRequestsMax = 4'096;
constexpr absl::Duration kTick = absl::Milliseconds(100);

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// What the threads of a run found. Thread-safe.
class Recorder {
 public:
  void Record(const absl::Status& status, double seconds) {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) {
      latencies_.push_back(seconds);
    } else {
      ++errors_;
      first_error_.Update(status);
    }
  }

  void BeginRequest() {
    absl::MutexLock lock(&mutex_);
    ++open_;
  }

  void EndRequest() {
    absl::MutexLock lock(&mutex_);
    --open_;
  }

  int64_t open() const {
    absl::MutexLock lock(&mutex_);
    return open_;
  }

  void WaitUntilAllEnded() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int64_t* open) { return *open == 0; }, &open_));
  }

  LoadResult Finish(const Workload& workload, const LoadPlan& plan, double seconds) {
    absl::MutexLock lock(&mutex_);
    const auto answered = static_cast<double>(latencies_.size());
    LoadResult result;
    result.rows = workload.args().rows;
    result.concurrency = plan.concurrency;
    result.request_rate = plan.request_rate;
    result.requests = static_cast<int64_t>(latencies_.size());
    result.errors = errors_;
    result.first_error = first_error_;
    result.seconds = seconds;
    result.rows_per_second = answered * static_cast<double>(result.rows) / seconds;
    result.gigabytes_per_second =
        answered * static_cast<double>(workload.hidden_bytes()) / seconds / 1e9;
    result.latency = SummarizeLatencies(std::move(latencies_));
    return result;
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<double> latencies_ ABSL_GUARDED_BY(mutex_);
  int64_t errors_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status first_error_ ABSL_GUARDED_BY(mutex_);
};

/// `count` requests from `concurrency` threads, unmeasured.
void WarmUp(Client& client, const Workload& workload, int64_t count, int64_t concurrency) {
  std::atomic<int64_t> left{count};
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < std::min(concurrency, count); ++i) {
    threads.emplace_back([&] {
      // What fails here fails again where it is counted.
      while (left.fetch_sub(1) > 0) client.Score(workload.args()).IgnoreError();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class Run {
 public:
  Run(Client& client, const Workload& workload, const LoadPlan& plan,
      const std::function<void(double)>& on_progress)
      : client_(client), workload_(workload), plan_(plan), on_progress_(on_progress) {}

  LoadResult Closed() {
    std::atomic<int64_t> running{plan_.concurrency};
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < plan_.concurrency; ++i) {
      threads.emplace_back([&] {
        while (TakeRequest()) {
          const auto sent = Clock::now();
          const absl::Status status = client_.Score(workload_.args()).status();
          recorder_.Record(status, SecondsSince(sent));
        }
        running.fetch_sub(1);
      });
    }
    while (running.load() > 0) {
      ReportProgress();
      // The threads end by themselves; a short run must not wait for a whole tick.
      absl::SleepFor(std::min(kTick, plan_.requests > 0 ? absl::Milliseconds(5) : kTick));
    }
    for (std::thread& thread : threads) thread.join();
    return recorder_.Finish(workload_, plan_, SecondsSince(start_));
  }

  LoadResult Open() {
    std::mt19937_64 random(plan_.seed);
    double arrival_seconds = 0;
    while (TakeRequest()) {
      arrival_seconds += absl::Exponential<double>(random, plan_.request_rate);
      const auto arrival = start_ + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(arrival_seconds));
      while (Clock::now() < arrival) {
        ReportProgress();
        const absl::Duration wait = absl::FromChrono(arrival - Clock::now());
        absl::SleepFor(std::min(kTick, std::max(wait, absl::ZeroDuration())));
      }
      if (recorder_.open() >= kOpenRequestsMax) {
        recorder_.Record(absl::ResourceExhaustedError(
                             "4096 requests are unanswered: the rate is beyond the server"),
                         0);
        continue;
      }
      recorder_.BeginRequest();
      client_.ScoreAsync(workload_.args(),
                         [this, arrival](const absl::StatusOr<ScoreResult>& result) {
                           recorder_.Record(result.status(), SecondsSince(arrival));
                           recorder_.EndRequest();
                         });
    }
    recorder_.WaitUntilAllEnded();
    return recorder_.Finish(workload_, plan_, SecondsSince(start_));
  }

 private:
  /// Whether the plan wants one more request.
  bool TakeRequest() {
    if (plan_.requests > 0) return taken_.fetch_add(1) < plan_.requests;
    return SecondsSince(start_) < absl::ToDoubleSeconds(plan_.duration);
  }

  void ReportProgress() {
    const double share =
        plan_.requests > 0
            ? static_cast<double>(taken_.load()) / static_cast<double>(plan_.requests)
            : SecondsSince(start_) / absl::ToDoubleSeconds(plan_.duration);
    on_progress_(std::min(share, 1.0));
  }

  Client& client_;
  const Workload& workload_;
  const LoadPlan& plan_;
  const std::function<void(double)>& on_progress_;
  const Clock::time_point start_ = Clock::now();
  std::atomic<int64_t> taken_{0};
  Recorder recorder_;
};

}  // namespace

LoadResult RunLoad(Client& client, const Workload& workload, const LoadPlan& plan,
                   const std::function<void(double)>& on_progress) {
  WarmUp(client, workload, plan.warmup_requests, plan.concurrency);
  Run run(client, workload, plan, on_progress);
  return plan.request_rate > 0 ? run.Open() : run.Closed();
}

}  // namespace logprobd::client
