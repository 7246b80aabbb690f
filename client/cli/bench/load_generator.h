#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/bench/arrivals.h"
#include "client/cli/bench/cuda_memory.h"
#include "client/cli/bench/load_result.h"
#include "client/cli/bench/row_memory.h"
#include "client/cli/bench/row_mix.h"
#include "client/cli/bench/row_pool.h"
#include "client/cli/bench/window_series.h"
#include "client/cpp/client.h"

namespace logprobd::client {

/// How to load a server.
struct LoadPlan {
  RowMix mix = {.sizes = {{}}};
  int64_t concurrency = 1;  ///< Requests always in flight (closed loop), >= 1.
  /// Requests a second, whether or not earlier ones have been answered; 0: closed loop.
  double request_rate = 0;
  Arrivals arrivals = Arrivals::kPoisson;
  /// Most requests of an open loop that may be unanswered, >= 1. What is due beyond them waits, and
  /// its latency with it. Bounds memory. With fresh rows as many as fit into 1 GiB.
  int64_t inflight_max = 4'096;
  /// Threads that write rows and send, >= 1; 0: one for each core, at most one a request in flight.
  int64_t writers = 0;
  /// Writes the rows of each request anew, as a trainer does; else the same bytes are sent again.
  bool fresh = false;

  int64_t requests = 0;                            ///< To measure; 0: by time.
  absl::Duration duration = absl::ZeroDuration();  ///< To measure; 0: until it is stable.
  absl::Duration window = absl::Seconds(1);
  WindowSeries::Criterion stability = {};
  int64_t windows_max = 10;  ///< Ends a run that does not become stable, >= 3.

  int64_t warmup_requests = 0;
  absl::Duration warmup_time = absl::ZeroDuration();  ///< Of the plan's own load.
  uint64_t seed = 1;                                  ///< Of sizes and arrivals.
};

/// Where requests go: a Client, or a fake in tests. Thread-safe.
class LoadTarget {
 public:
  virtual ~LoadTarget() = default;
  /// `done` is called once, perhaps before this returns. What `args` refers to is valid until then.
  virtual void Send(const ScoreArgs& args, ScoreCallback done) = 0;
  /// The same from a thread that has nothing else to do until then: it may be kept waiting.
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

/// Monotonic time, with an arbitrary epoch. Thread-safe.
class LoadClock {
 public:
  virtual ~LoadClock() = default;
  virtual absl::Time Now() const = 0;
  virtual void SleepUntil(absl::Time time) = 0;
  /// The system's steady clock.
  static LoadClock& Steady();
};

/// Is told of a run while it goes on.
class LoadObserver {
 public:
  virtual ~LoadObserver() = default;
  /// Warm-up is over; on the thread of RunLoad, as the next two.
  virtual void MeasureBegins() {}
  virtual void MeasureEnds() {}
  /// About ten times a second: the share of the run that is done, 0 to 1.
  virtual void Progress(double /*share*/) {}
  /// An answer to `rows` rows that began with distinct row `first` of the pool, warm-up included;
  /// on any thread.
  virtual void Answered(int64_t /*first*/, int64_t /*rows*/, const ScoreResult& /*result*/) {}
};

/// What a run works with.
struct LoadFixture {
  LoadTarget& target;
  const RowPool& pool;  ///< For at least the plan's largest request.
  RowMemory& memory;    ///< For fresh rows.
  /// Not null: requests name rows in this GPU's memory; `memory` is not used.
  CudaMemory* device = nullptr;
  ScoreArgs request;  ///< Head, outputs and the like of every request; rows are filled in.
  LoadObserver& observer;
  LoadClock& clock = LoadClock::Steady();
};

/// Runs the plan: warm-up, then measuring. Errors are those of memory; failed requests are counted.
absl::StatusOr<LoadMeasurement> RunLoad(const LoadFixture& fixture, const LoadPlan& plan);

}  // namespace logprobd::client
