#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "absl/types/span.h"
#include "server/batching/device_turns.h"

namespace logprobd {

/// The turns of one head on devices that it may share with other heads. A head that shares none
/// needs no turns: it does not call Take, and the other functions do nothing.
///
/// Take, Withdraw and GiveBack may wake other heads, which takes the locks of those: the caller
/// must hold no lock. Take and Withdraw may be called from one thread at a time, the other
/// functions from any thread.
class HeadTurns {
 public:
  /// Turns of head number `head` of `turns`, which is null if the head shares no device.
  HeadTurns(DeviceTurns* turns, int head) : turns_(turns), head_(head) {}

  bool is_sharing() const { return turns_ != nullptr; }
  /// Returns whether the last Take found no turn, so that the head is woken when it can have one.
  bool is_waiting() const { return is_waiting_; }

  /// Sets the function that wakes the waiting head; see DeviceTurns::SetWake.
  void SetWake(std::function<void()> wake) {
    if (turns_ != nullptr) turns_->SetWake(head_, std::move(wake));
  }

  /// Takes a turn for a batch on one of `replicas`, not empty and in order of preference. If none
  /// of them can have it, returns nullopt and the head waits.
  std::optional<int> Take(absl::Span<const int> replicas) {
    const std::optional<int> replica = turns_->Take(head_, replicas);
    is_waiting_ = !replica.has_value();
    return replica;
  }

  /// Ends the wait of a head that has nothing to launch, because a waiting head keeps devices from
  /// others.
  void Withdraw() {
    if (is_waiting_.exchange(false)) turns_->Withdraw(head_);
  }

  /// Counts the rows of a batch that has a turn. The caller may hold locks.
  void Charge(int64_t rows) {
    if (turns_ != nullptr) turns_->Charge(head_, rows);
  }

  /// Ends the turn of a batch on `replica`.
  void GiveBack(int replica) {
    if (turns_ != nullptr) turns_->GiveBack(head_, replica);
  }

 private:
  DeviceTurns* const turns_;
  const int head_;
  std::atomic<bool> is_waiting_ = false;
};

}  // namespace logprobd
