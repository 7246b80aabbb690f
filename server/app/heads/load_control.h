#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/weight_store.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// Returns UNAVAILABLE: the server is shutting down.
absl::Status ShuttingDown();

/// The right to load weights. Only one load of a server has it at a time, whichever head the load
/// is for, so that memory which the load has found free stays free until it takes it. Thread-safe.
class LoadTurn {
 public:
  /// Holds the turn until it is destroyed.
  class Holder {
   public:
    explicit Holder(LoadTurn& turn) : turn_(&turn) {}
    Holder(Holder&& other) noexcept : turn_(std::exchange(other.turn_, nullptr)) {}
    Holder& operator=(Holder&&) = delete;
    ~Holder() {
      if (turn_ != nullptr) turn_->Release();
    }

   private:
    LoadTurn* turn_;
  };

  /// Waits for the turn. Returns nothing if another load holds it for the whole of `wait_max`.
  std::optional<Holder> Take(absl::Duration wait_max);

 private:
  void Release();

  absl::Mutex mutex_;
  bool is_taken_ ABSL_GUARDED_BY(mutex_) = false;
};

/// Reports the progress of a load to its caller and asks whether to continue. All calls are made on
/// the caller's thread.
class LoadTicker {
 public:
  /// Receives the progress; returns false to cancel the load.
  using Progress = std::function<bool(const WeightsProgress&)>;

  /// Interval at which a load that waits for something calls Report.
  static constexpr absl::Duration kPeriod = absl::Milliseconds(20);

  /// `progress` may be empty. Both arguments must outlive the ticker.
  LoadTicker(const Progress& progress, const std::atomic<bool>& is_stopped)
      : progress_(progress), is_stopped_(is_stopped) {}

  /// Passes the progress on a few times a second; may be called much more often. If the result is
  /// not OK, the load ends with it: CANCELLED by the caller, UNAVAILABLE once `is_stopped` is set.
  absl::Status Report(absl::string_view phase, int64_t bytes_done, int64_t bytes_total);

 private:
  const Progress& progress_;
  const std::atomic<bool>& is_stopped_;
  std::string phase_;
  absl::Time next_ = absl::InfinitePast();
};

/// A weight whose reads return CANCELLED once `stop` is set, so that an engine that is loading the
/// weight gives up after the rows of its current read. Both arguments must outlive it.
class StoppableWeights final : public HeadWeights {
 public:
  StoppableWeights(const HeadWeights& weights, const std::atomic<bool>& stop)
      : weights_(weights), stop_(stop) {}

  const HeadInfo& info() const override { return weights_.info(); }
  const std::vector<float>& bias() const override { return weights_.bias(); }
  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override;

 private:
  const HeadWeights& weights_;
  const std::atomic<bool>& stop_;
};

}  // namespace logprobd
