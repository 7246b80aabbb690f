// A Batcher's turns on devices that several heads share: one is taken before a batch is cut and
// given back when its engine is done. Other heads are woken with no lock held: theirs is taken.

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "server/batching/batcher_impl.h"

namespace logprobd {

/// Launches the next batch if the head can have its turn, else waits for it; whether anything was
/// done.
bool Batcher::Impl::LaunchInTurnLocked(RowQueue& queue, VersionReplicas& generation) {
  std::vector<std::pair<int, int>> free;  // batches in flight, replica
  for (const std::unique_ptr<Slot>& slot : generation.slots) {
    if (slot->state == SlotState::kFree && slot->replica.engine.healthy()) {
      free.emplace_back(slot->replica.in_flight, slot->replica.index);
    }
  }
  std::sort(free.begin(), free.end());
  std::vector<int> replicas;
  replicas.reserve(free.size());
  for (const auto& [in_flight, replica] : free) {
    replicas.push_back(replica);
  }
  if (replicas.empty()) {
    return WithdrawLocked();  // the last has failed just now
  }
  launching_ = &generation;  // so that it stays while the mutex is released
  mutex_.Unlock();
  const std::optional<int> replica = options_.turns->Take(options_.turns_head, replicas);
  mutex_.Lock();
  launching_ = nullptr;
  waits_for_turn_ = !replica.has_value();
  if (!replica.has_value()) {
    return false;
  }
  // Since then the queue may have become another generation's (Commit), or empty.
  if (&queue != &QueueOfLocked(generation) || !IsTurnOfLocked(generation) || queue.empty() ||
      is_stopping_) {
    mutex_.Unlock();
    options_.turns->GiveBack(options_.turns_head, *replica);
    mutex_.Lock();
    return true;
  }
  // Slots are taken by this thread alone, so that one of the replica's is still free.
  const auto slot = absl::c_find_if(generation.slots, [&](const auto& candidate) {
    return candidate->state == SlotState::kFree && candidate->replica.index == *replica;
  });
  LaunchLocked(queue, **slot, clock_.Now());
  return true;
}

/// With nothing to launch the head must not wait on: who waits keeps devices from others.
bool Batcher::Impl::WithdrawLocked() {
  if (!std::exchange(waits_for_turn_, false)) {
    return false;
  }
  mutex_.Unlock();
  options_.turns->Withdraw(options_.turns_head);
  mutex_.Lock();
  return true;
}

void Batcher::Impl::GiveTurnBack(const Slot& slot) {
  if (options_.turns != nullptr) {
    options_.turns->GiveBack(options_.turns_head, slot.replica.index);
  }
}

}  // namespace logprobd
