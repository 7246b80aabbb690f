#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/base/clock.h"
#include "server/base/heartbeat.h"

namespace logprobd {

/// A thread that has work in hand and has not moved for `time`.
struct HungThread {
  std::shared_ptr<const Heartbeat> heartbeat;
  absl::Duration time;
};

/// Measures how long threads stand still, from one look at their heartbeats to the next. Only the
/// time between looks counts, and at most twice the interval at which the caller looks: if the
/// whole process was stopped (SIGSTOP, a debugger, a frozen machine), no thread could have moved.
class HangMeter {
 public:
  explicit HangMeter(absl::Duration interval) : step_max_(2 * interval) {}

  /// Returns the threads that have not moved since the last look, the longest hang first.
  std::vector<HungThread> Look(absl::Time now,
                               absl::Span<const std::shared_ptr<const Heartbeat>> heartbeats);

 private:
  struct Seen {
    int64_t beats;
    absl::Duration still;
  };
  /// Does not keep a heartbeat in its table when its thread has ended.
  using SeenHeartbeats = std::map<std::weak_ptr<const Heartbeat>, Seen, std::owner_less<>>;

  const absl::Duration step_max_;
  absl::Time last_look_ = absl::InfiniteFuture();
  SeenHeartbeats seen_;
};

/// Looks at the heartbeats of a process on a thread of its own, which calls no driver and takes no
/// lock of the threads that it watches.
class Watchdog {
 public:
  struct Options {
    /// Longest time for which a thread that has work in hand may stand still, > 0.
    absl::Duration still_max = absl::InfiniteDuration();
    /// Called once, on the watchdog's thread, when threads stand still for longer. Nothing is
    /// looked at any more from then on.
    std::function<void(absl::Span<const HungThread>)> on_hang;
    /// Interval at which `ping` is called, on the watchdog's thread, as long as every thread has
    /// moved within the last interval or has no work. Infinite means never.
    absl::Duration ping_interval = absl::InfiniteDuration();
    std::function<void()> ping;
  };

  /// Interval at which the watchdog looks.
  static constexpr absl::Duration kInterval = absl::Milliseconds(250);

  /// Returns RESOURCE_EXHAUSTED if the thread cannot be started. `heartbeats` and `clock` must
  /// outlive the watchdog.
  static absl::StatusOr<std::unique_ptr<Watchdog>> Create(Options options,
                                                          const Heartbeats& heartbeats,
                                                          const Clock& clock);
  /// Ends the thread.
  ~Watchdog();

 private:
  Watchdog(Options options, const Heartbeats& heartbeats, const Clock& clock);
  void Run();

  const Options options_;
  const Heartbeats& heartbeats_;
  const Clock& clock_;
  absl::Mutex mutex_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

/// Returns text such as "thread engine-finish, head default, replica 0, shard 1 has not moved for
/// 126 s", without the parts that do not apply to the thread.
std::string DescribeHang(const HungThread& hung);

}  // namespace logprobd
