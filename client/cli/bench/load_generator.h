#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/bench/cuda_memory.h"
#include "client/cli/bench/measurement.h"
#include "client/cli/bench/row_pool.h"
#include "client/cli/bench/schedule.h"
#include "client/cpp/client.h"

namespace logprobd::client {

/// The load of one run.
struct LoadPlan {
  RowMix mix = {.sizes = {{}}};
  int64_t concurrency = 1;  ///< Requests that a closed loop keeps in flight, >= 1.
  /// Requests per second of an open loop, which sends whether or not earlier requests were
  /// answered; 0: closed loop.
  double request_rate = 0;
  Arrivals arrivals = Arrivals::kPoisson;
  /// Maximum number of unanswered requests of an open loop, >= 1. Further requests that are due
  /// wait, and their latency includes the wait. Fresh rows of requests in flight take at most 1 GiB
  /// of memory, which may reduce this number.
  int64_t inflight_max = 4'096;
  /// Number of threads that write and send rows, or 0 for one per core. There are never more
  /// threads than requests in flight.
  int64_t writers = 0;
  /// If true, new rows are written for each request, as a trainer does. If false, every request
  /// sends the same bytes.
  bool fresh = false;

  int64_t requests = 0;                            ///< Requests to measure; 0: ends by time.
  absl::Duration duration = absl::ZeroDuration();  ///< Time to measure; 0: until the run is stable.
  absl::Duration window = absl::Seconds(1);
  WindowSeries::Criterion stability = {};
  int64_t windows_max = 10;  ///< Windows after which an unstable run ends, >= 3.

  int64_t warmup_requests = 0;  ///< Number of requests sent first, in a closed loop.
  uint64_t seed = 1;            ///< Seed of sizes and arrivals.

  bool is_open_loop() const { return request_rate > 0; }
};

/// The receiver of requests: a Client, or a fake in tests. Thread-safe.
class LoadTarget {
 public:
  virtual ~LoadTarget() = default;
  /// Sends a request and calls `done` once, possibly before Send returns. The data that `args`
  /// points to must stay valid until then.
  virtual void Send(const ScoreArgs& args, ScoreCallback done) = 0;
  /// Behaves like Send but may block the calling thread until the answer arrives.
  virtual void SendAndWait(const ScoreArgs& args, ScoreCallback done) {
    Send(args, std::move(done));
  }
};

class ClientTarget final : public LoadTarget {
 public:
  explicit ClientTarget(Client& client) : client_(client) {}
  void Send(const ScoreArgs& args, ScoreCallback done) override {
    client_.ScoreAsync(args, std::move(done));
  }
  void SendAndWait(const ScoreArgs& args, ScoreCallback done) override {
    std::move(done)(client_.Score(args));
  }

 private:
  Client& client_;
};

/// Monotonic time with an arbitrary epoch. Thread-safe.
class LoadClock {
 public:
  virtual ~LoadClock() = default;
  virtual absl::Time Now() const = 0;
  virtual void SleepUntil(absl::Time time) = 0;
  /// Returns the system's steady clock.
  static LoadClock& Steady();
};

/// Receives the events of a run.
class LoadObserver {
 public:
  virtual ~LoadObserver() = default;
  /// Called by the thread of RunLoad when the warm-up is over and measuring starts.
  virtual void MeasureBegins() {}
  /// Called by the thread of RunLoad when measuring ends. Requests may still be in flight.
  virtual void MeasureEnds() {}
  /// Called by the thread of RunLoad about ten times per second with the finished share of the run,
  /// 0 to 1.
  virtual void Progress(double /*share*/) {}
  /// Called with each answer to `rows` rows that start with distinct row `first` of the pool, also
  /// during warm-up. May be called from any thread.
  virtual void Answered(int64_t /*first*/, int64_t /*rows*/, const ScoreResult& /*result*/) {}
};

/// The objects that a run works with.
struct LoadFixture {
  LoadTarget& target;
  const RowPool& pool;  ///< Created for requests of at least the plan's largest size.
  ScoreArgs request;    ///< Template of every request (head, outputs, ...); rows are filled in.
  /// Allocates memory for the fresh rows of a request: on the heap, or, with Client::AllocateRows,
  /// where the server reads them.
  std::function<absl::StatusOr<RowBuffer>(int64_t bytes)> allocate = AllocateHeapRows;
  /// If set, requests name rows in this GPU's memory and `allocate` is not used.
  CudaMemory* device = nullptr;
  LoadObserver& observer;
  LoadClock& clock = LoadClock::Steady();
};

/// Runs the plan: warms up, then measures. Returns only the errors of allocating and filling
/// memory; failed requests are counted.
absl::StatusOr<LoadMeasurement> RunLoad(const LoadFixture& fixture, const LoadPlan& plan);

}  // namespace logprobd::client
