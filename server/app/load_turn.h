#pragma once

#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logprobd {

/// The right to load weights, which one load of a server has at a time, whichever head it is for:
/// what one of them finds free no other takes meanwhile. Thread-safe.
class LoadTurn {
 public:
  /// Has the turn as long as it lives.
  class Holder {
   public:
    explicit Holder(LoadTurn& turn) : turn_(&turn) {}
    Holder(Holder&& other) noexcept : turn_(std::exchange(other.turn_, nullptr)) {}
    Holder& operator=(Holder&&) = delete;
    ~Holder() {
      if (turn_ != nullptr) {
        turn_->GiveBack();
      }
    }

   private:
    LoadTurn* turn_;
  };

  /// Nothing when another has it for all of `wait_max`.
  std::optional<Holder> Take(absl::Duration wait_max) {
    const absl::MutexLock lock(&mutex_);
    const auto is_free = +[](bool* is_taken) { return !*is_taken; };
    if (!mutex_.AwaitWithTimeout(absl::Condition(is_free, &is_taken_), wait_max)) {
      return std::nullopt;
    }
    is_taken_ = true;
    return std::optional<Holder>(std::in_place, *this);
  }

 private:
  void GiveBack() {
    const absl::MutexLock lock(&mutex_);
    is_taken_ = false;
  }

  absl::Mutex mutex_;
  bool is_taken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace logprobd
