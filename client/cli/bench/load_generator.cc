#include "client/cli/bench/load_generator.h"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"

namespace logprobd::client {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(100);
constexpr absl::Duration kLate = absl::Milliseconds(1);
constexpr int64_t kFreshBytesMax = int64_t{1} << 30;
constexpr int64_t kWritersMax = 64;

class SteadyClock final : public LoadClock {
 public:
  absl::Time Now() const override {
    return absl::UnixEpoch() +
           absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  }
  void SleepUntil(absl::Time time) override {
    const absl::Duration wait = time - Now();
    if (wait > absl::ZeroDuration()) absl::SleepFor(wait);
  }
};

/// Memory for one request in flight and its fresh rows.
struct Slot {
  RowBuffer hidden;
  std::optional<CudaBuffer> device;  ///< Replaces `hidden` for rows in GPU memory.
  std::vector<int32_t> targets;
};

/// The slots that no request uses. Thread-safe.
class FreeSlots {
 public:
  void Return(Slot* slot) {
    const absl::MutexLock lock(&mutex_);
    free_.push_back(slot);
  }

  /// Waits for a free slot. Sets `is_short` to whether at most one slot was free.
  Slot* Take(bool* is_short) {
    const absl::MutexLock lock(&mutex_);
    *is_short = free_.size() <= 1;
    mutex_.Await(absl::Condition(this, &FreeSlots::HasSlot));
    Slot* const slot = free_.back();
    free_.pop_back();
    return slot;
  }

  void AwaitAll(size_t count) {
    const absl::MutexLock lock(&mutex_);
    const auto has_all = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return free_.size() == count;
    };
    mutex_.Await(absl::Condition(&has_all));
  }

 private:
  bool HasSlot() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !free_.empty(); }

  absl::Mutex mutex_;
  std::vector<Slot*> free_ ABSL_GUARDED_BY(mutex_);
};

/// A request to send.
struct Ticket {
  int64_t index = 0;
  size_t size = 0;                ///< Index into RowMix::sizes.
  std::optional<absl::Time> due;  ///< Planned time; absent in a closed loop.
};

/// The condition that ends a phase of a run. A phase also ends when it is stopped.
struct PhaseEnd {
  int64_t requests = 0;  ///< Number of requests; 0: ends by time.
  absl::Duration duration = absl::InfiniteDuration();
};

/// Sends requests from `writers` threads until the phase ends or is stopped.
class Phase {
 public:
  /// `device_pool` holds the pool's rows on the GPU; it is null if rows are on the host.
  Phase(const LoadFixture& fixture, const CudaBuffer* device_pool, const LoadPlan& plan,
        const PhaseEnd& end, absl::Span<Slot> slots, int64_t writers)
      : fixture_(fixture),
        device_pool_(device_pool),
        plan_(plan),
        end_(end),
        num_slots_(slots.size()),
        waits_(!plan.is_open_loop() && writers == static_cast<int64_t>(slots.size())),
        start_(fixture.clock.Now()),
        recorder_(plan.mix.sizes.size()) {
    if (plan.is_open_loop()) schedule_.emplace(plan.arrivals, plan.request_rate, plan.seed);
    for (Slot& slot : slots) free_.Return(&slot);
    num_writing_ = writers;
    for (int64_t i = 0; i < writers; ++i) threads_.emplace_back([this] { Write(); });
  }

  /// Stops and waits for the answers to all requests that were sent.
  ~Phase() {
    Stop();
    for (std::thread& thread : threads_) thread.join();
    free_.AwaitAll(num_slots_);
  }

  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

  void Stop() { is_stopped_.store(true, std::memory_order_relaxed); }

  /// Waits up to `timeout` until every request is sent. Returns whether all are sent.
  bool AwaitSent(absl::Duration timeout) {
    const absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(
        absl::Condition(
            +[](int64_t* writing) { return *writing == 0; }, &num_writing_),
        timeout);
  }

  /// Waits until every request is sent and answered.
  void AwaitAnswers() {
    AwaitSent(absl::InfiniteDuration());
    free_.AwaitAll(num_slots_);
  }

  absl::Time start() const { return start_; }
  LoadRecorder& recorder() { return recorder_; }

  double SecondsDone() const { return absl::ToDoubleSeconds(fixture_.clock.Now() - start_); }

  double ShareDone() {
    const absl::MutexLock lock(&mutex_);
    const double share = end_.requests > 0
                             ? static_cast<double>(num_taken_) / static_cast<double>(end_.requests)
                             : SecondsDone() / absl::ToDoubleSeconds(end_.duration);
    return std::min(share, 1.0);
  }

 private:
  std::optional<Ticket> NextTicket() {
    const absl::MutexLock lock(&mutex_);
    if (is_stopped_.load(std::memory_order_relaxed)) return std::nullopt;
    if (end_.requests > 0 && num_taken_ == end_.requests) return std::nullopt;
    if (end_.requests == 0 && fixture_.clock.Now() - start_ >= end_.duration) {
      EndByTime();
      return std::nullopt;
    }
    Ticket ticket{
        .index = num_taken_, .size = plan_.mix.Draw(plan_.seed, num_taken_), .due = std::nullopt};
    if (schedule_.has_value()) ticket.due = start_ + schedule_->Next();
    if (end_.requests == 0 && ticket.due.has_value() && *ticket.due - start_ >= end_.duration) {
      is_stopped_.store(true, std::memory_order_relaxed);
      return std::nullopt;
    }
    ++num_taken_;
    return ticket;
  }

  /// Stops the phase and counts the requests that were due but will not be sent.
  void EndByTime() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    is_stopped_.store(true, std::memory_order_relaxed);
    if (!schedule_.has_value()) return;
    int64_t unsent = 0;
    while (schedule_->Next() < end_.duration) ++unsent;
    recorder_.RecordUnsent(unsent);
  }

  void Write() {
    // The default timer slack of 50 us would show in the latency of an open loop.
    prctl(PR_SET_TIMERSLACK, 1UL);
    while (true) {
      bool is_short = false;
      Slot* const slot = free_.Take(&is_short);
      if (is_short) is_behind_.store(true, std::memory_order_relaxed);
      const std::optional<Ticket> ticket = NextTicket();
      if (!ticket.has_value() || !WaitUntilDue(*ticket)) {
        free_.Return(slot);
        break;
      }
      Send(*slot, *ticket, is_short);
    }
    const absl::MutexLock lock(&mutex_);
    --num_writing_;
  }

  /// Waits until at most one tick before the request is due. Returns false if the phase is stopped
  /// during the wait.
  bool WaitUntilDue(const Ticket& ticket) {
    if (!ticket.due.has_value()) return true;
    // The thread sleeps in steps, so that a run with a low rate ends on time.
    while (fixture_.clock.Now() + kTick < *ticket.due) {
      if (is_stopped_.load(std::memory_order_relaxed)) return false;
      fixture_.clock.SleepUntil(fixture_.clock.Now() + kTick);
    }
    return true;
  }

  void Send(Slot& slot, const Ticket& ticket, bool is_short) {
    const RowPool& pool = fixture_.pool;
    const int64_t rows = plan_.mix.sizes[ticket.size].rows;
    ScoreArgs args = fixture_.request;
    args.rows = rows;
    args.hidden_size = pool.hidden_size();
    args.dtype = pool.dtype();
    // Each request starts at another row, so that its bytes differ from those of the previous one.
    const int64_t first = plan_.fresh ? ticket.index * kFreshStride % pool.distinct_rows() : 0;
    const absl::Status written = AddRows(first, slot, args);
    if (ticket.due.has_value()) fixture_.clock.SleepUntil(*ticket.due);
    const absl::Time sent = fixture_.clock.Now();
    if (ticket.due.has_value()) NoteLateness(sent - *ticket.due, is_short);
    const absl::Time start = ticket.due.value_or(sent);
    if (!written.ok()) {
      recorder_.RecordFailure(ticket.size, written);
      free_.Return(&slot);
      return;
    }
    const auto take = [this, &slot, start, first, rows,
                       size = ticket.size](const absl::StatusOr<ScoreResult>& result) {
      if (result.ok()) {
        recorder_.RecordAnswer(size, rows, absl::ToDoubleSeconds(fixture_.clock.Now() - start),
                               result->transport);
        fixture_.observer.Answered(first, rows, *result);
      } else {
        recorder_.RecordFailure(size, result.status());
      }
      free_.Return(&slot);
    };
    if (waits_) {
      fixture_.target.SendAndWait(args, take);
    } else {
      fixture_.target.Send(args, take);
    }
  }

  /// Adds the rows of a request to `args`, and writes them first if the plan requires fresh
  /// rows.
  absl::Status AddRows(int64_t first, Slot& slot, ScoreArgs& args) {
    const RowPool& pool = fixture_.pool;
    const int64_t bytes = args.rows * pool.row_bytes();
    if (!plan_.fresh) {
      args.targets = pool.targets().subspan(0, static_cast<size_t>(args.rows));
      if (device_pool_ != nullptr) {
        args.device_rows = device_pool_->Rows(0, bytes);
      } else {
        args.hidden = pool.hidden().subspan(0, static_cast<size_t>(bytes));
      }
      return absl::OkStatus();
    }
    slot.targets.resize(static_cast<size_t>(args.rows));
    args.targets = slot.targets;
    if (device_pool_ == nullptr) {
      pool.Fill(first, args.rows, slot.hidden.bytes(), absl::MakeSpan(slot.targets));
      args.hidden = slot.hidden.bytes().subspan(0, static_cast<size_t>(bytes));
      return absl::OkStatus();
    }
    pool.FillTargets(first, args.rows, absl::MakeSpan(slot.targets));
    args.device_rows = slot.device->Rows(0, bytes);
    int64_t offset = 0;
    for (const RowPool::Run& run : pool.Runs(first, args.rows)) {
      const int64_t run_bytes = run.count * pool.row_bytes();
      absl::Status status =
          slot.device->Copy(offset, *device_pool_, run.begin * pool.row_bytes(), run_bytes);
      if (!status.ok()) return status;
      offset += run_bytes;
    }
    return absl::OkStatus();
  }

  void NoteLateness(absl::Duration lateness, bool is_short) {
    if (lateness <= kLate) {
      if (!is_short) is_behind_.store(false, std::memory_order_relaxed);
    } else {
      recorder_.RecordLate(absl::ToDoubleSeconds(lateness),
                           is_behind_.load(std::memory_order_relaxed));
    }
  }

  // The stride is a prime number, so that consecutive requests start at rows that are far apart.
  static constexpr int64_t kFreshStride = 101;

  const LoadFixture& fixture_;
  const CudaBuffer* const device_pool_;
  const LoadPlan& plan_;
  const PhaseEnd end_;
  const size_t num_slots_;
  /// True in a closed loop with one thread per request, which then makes blocking calls, as most
  /// callers do.
  const bool waits_;
  const absl::Time start_;
  LoadRecorder recorder_;
  FreeSlots free_;
  std::atomic<bool> is_stopped_{false};
  /// True if the slots ran out and no request was sent on time with free slots since then.
  std::atomic<bool> is_behind_{false};

  absl::Mutex mutex_;
  std::optional<ArrivalSchedule> schedule_ ABSL_GUARDED_BY(mutex_);
  int64_t num_taken_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_writing_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> threads_;
};

int64_t InflightMax(const LoadPlan& plan, const RowPool& pool) {
  if (!plan.is_open_loop()) return plan.concurrency;
  if (!plan.fresh) return plan.inflight_max;
  const int64_t request_bytes = plan.mix.rows_max() * pool.row_bytes();
  return std::clamp<int64_t>(kFreshBytesMax / request_bytes, 1, plan.inflight_max);
}

int64_t Writers(const LoadPlan& plan, int64_t inflight_max) {
  const int64_t cores = std::max(1U, std::thread::hardware_concurrency());
  const int64_t num_writers = plan.writers > 0 ? plan.writers : cores;
  return std::min({num_writers, inflight_max, kWritersMax});
}

absl::StatusOr<std::vector<Slot>> MakeSlots(const LoadFixture& fixture, const LoadPlan& plan) {
  std::vector<Slot> slots(static_cast<size_t>(InflightMax(plan, fixture.pool)));
  if (!plan.fresh) return slots;
  const int64_t bytes = plan.mix.rows_max() * fixture.pool.row_bytes();
  for (Slot& slot : slots) {
    if (fixture.device != nullptr) {
      absl::StatusOr<CudaBuffer> device = fixture.device->Allocate(bytes);
      if (!device.ok()) return device.status();
      slot.device = *std::move(device);
      continue;
    }
    absl::StatusOr<RowBuffer> hidden = fixture.allocate(bytes);
    if (!hidden.ok()) return hidden.status();
    slot.hidden = *std::move(hidden);
  }
  return slots;
}

/// Copies the pool's rows to the GPU. Returns no buffer if rows stay on the host.
absl::StatusOr<std::optional<CudaBuffer>> MakeDevicePool(const LoadFixture& fixture) {
  if (fixture.device == nullptr) return std::nullopt;
  const absl::Span<const std::byte> rows = fixture.pool.hidden();
  absl::StatusOr<CudaBuffer> buffer = fixture.device->Allocate(static_cast<int64_t>(rows.size()));
  if (!buffer.ok()) return buffer.status();
  if (absl::Status status = buffer->Write(0, rows); !status.ok()) return status;
  return *std::move(buffer);
}

void WarmUp(const LoadFixture& fixture, const CudaBuffer* device_pool, const LoadPlan& plan,
            absl::Span<Slot> slots, int64_t writers) {
  if (plan.warmup_requests == 0) return;
  // At a low rate, a few requests could take minutes; a closed loop sends them without pauses.
  LoadPlan closed = plan;
  closed.request_rate = 0;
  const size_t inflight = std::min(static_cast<size_t>(plan.concurrency), slots.size());
  Phase phase(fixture, device_pool, closed, {.requests = plan.warmup_requests},
              slots.first(inflight), std::min({writers, plan.warmup_requests, plan.concurrency}));
  phase.AwaitAnswers();
}

/// Divides a running phase into windows until it ends or the windows are stable.
WindowSeries MeasureWindows(const LoadFixture& fixture, const LoadPlan& plan, Phase& phase) {
  const bool until_stable = plan.requests == 0 && plan.duration == absl::ZeroDuration();
  WindowSeries series(plan.stability);
  double begin = 0;
  const auto cut = [&] {
    Interval window = phase.recorder().Take();
    window.begin_seconds = begin;
    window.seconds = phase.SecondsDone() - begin;
    begin += window.seconds;
    series.Add(std::move(window));
  };
  while (true) {
    const absl::Duration left =
        phase.start() + absl::Seconds(begin) + plan.window - fixture.clock.Now();
    const bool is_sent = phase.AwaitSent(std::clamp(left, absl::ZeroDuration(), kTick));
    if (is_sent) break;
    fixture.observer.Progress(
        until_stable
            ? std::min(phase.SecondsDone() / absl::ToDoubleSeconds(plan.window * plan.windows_max),
                       1.0)
            : phase.ShareDone());
    if (fixture.clock.Now() - phase.start() < absl::Seconds(begin) + plan.window) continue;
    cut();
    if (until_stable && (series.stable().value_or(false) ||
                         static_cast<int64_t>(series.figures().size()) >= plan.windows_max)) {
      return series;
    }
  }
  // Requests in flight belong to the run: a slow answer must not be left out. The remaining time
  // becomes a window only if it is at least half as long as the others.
  phase.AwaitAnswers();
  const double rest = phase.SecondsDone() - begin;
  if (rest < 0.5 * absl::ToDoubleSeconds(plan.window) && !series.figures().empty()) {
    Interval tail = phase.recorder().Take();
    tail.seconds = rest;
    series.Extend(tail);
  } else {
    cut();
  }
  return series;
}

}  // namespace

LoadClock& LoadClock::Steady() {
  static SteadyClock clock;
  return clock;
}

absl::StatusOr<LoadMeasurement> RunLoad(const LoadFixture& fixture, const LoadPlan& plan) {
  absl::StatusOr<std::vector<Slot>> slots = MakeSlots(fixture, plan);
  if (!slots.ok()) return slots.status();
  const absl::StatusOr<std::optional<CudaBuffer>> on_device = MakeDevicePool(fixture);
  if (!on_device.ok()) return on_device.status();
  const CudaBuffer* const device_pool = on_device->has_value() ? &**on_device : nullptr;
  const int64_t writers = Writers(plan, static_cast<int64_t>(slots->size()));
  WarmUp(fixture, device_pool, plan, absl::MakeSpan(*slots), writers);

  fixture.observer.MeasureBegins();
  const bool is_bounded = plan.requests > 0 || plan.duration > absl::ZeroDuration();
  PhaseEnd end{.requests = plan.requests};
  if (plan.requests == 0 && is_bounded) end.duration = plan.duration;
  Phase phase(fixture, device_pool, plan, end, absl::MakeSpan(*slots), writers);
  WindowSeries series = MeasureWindows(fixture, plan, phase);
  phase.Stop();
  fixture.observer.MeasureEnds();
  phase.AwaitAnswers();
  series.AddLateAnswers(phase.recorder().Take());
  return LoadMeasurement{.measured = is_bounded ? series.all() : series.LastWindows(),
                         .windows = series.figures(),
                         .stable = series.stable(),
                         .inflight_max = static_cast<int64_t>(slots->size())};
}

}  // namespace logprobd::client
