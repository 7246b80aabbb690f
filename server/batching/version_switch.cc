#include "server/batching/version_switch.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "server/base/errors.h"

namespace logprobd {

void VersionSwitch::Commit(VersionReplicas* next) {
  LOGPROBD_CHECK(retiring_ == nullptr, "the previous version has not retired yet");
  retiring_ = std::exchange(live_, next);
  if (live_ != nullptr) live_number_ = live_->weights_version;
  if (retiring_ == nullptr) return;
  for (const std::shared_ptr<PendingRequest>& pending : queue_.Queued()) {
    if (pending->has_begun() || pending->request.weights_version != 0) {
      queue_.Remove(*pending);
      pending->is_retiring = true;
      retiring_queue_.Push(pending);
    }
  }
}

bool VersionSwitch::IsRetired() const {
  return retiring_ == nullptr ||
         (retiring_queue_.empty() && retiring_->NumInFlight() == 0 && held_ != retiring_);
}

void VersionSwitch::ForgetRetired() {
  turn_ = turn_ == retiring_ ? nullptr : turn_;
  retiring_ = nullptr;
}

int VersionSwitch::NumInFlight() const {
  return (live_ == nullptr ? 0 : live_->NumInFlight()) +
         (retiring_ == nullptr ? 0 : retiring_->NumInFlight());
}

absl::Time VersionSwitch::OldestSubmitted() const {
  absl::Time oldest = absl::InfiniteFuture();
  for (const RowQueue* queue : {&queue_, &retiring_queue_}) {
    if (!queue->empty()) oldest = std::min(oldest, queue->OldestSubmitted());
  }
  return oldest;
}

RowQueue* VersionSwitch::FindUnservable() {
  if (!queue_.empty() && live_ != nullptr && live_->NumHealthy() == 0) return &queue_;
  return !retiring_queue_.empty() && retiring_->NumHealthy() == 0 ? &retiring_queue_ : nullptr;
}

VersionSwitch::Slot* VersionSwitch::FindLaunch(absl::Time now) const {
  if (!retiring_queue_.empty() && IsTurnOf(*retiring_)) {
    if (Slot* slot = retiring_->FindFreeSlot(); slot != nullptr) return slot;
  }
  Slot* slot = FindFreeSlot();
  return slot != nullptr && LaunchTimeIn(*slot, now) <= now ? slot : nullptr;
}

VersionSwitch::Slot* VersionSwitch::FindFreeSlot() const {
  return live_ != nullptr && IsTurnOf(*live_) ? live_->FindFreeSlot() : nullptr;
}

VersionSwitch::Slot* VersionSwitch::FindRelaunch() const {
  for (const VersionReplicas* version : {retiring_, live_}) {
    if (version != nullptr) {
      if (Slot* slot = version->FindRelaunch(); slot != nullptr) return slot;
    }
  }
  return nullptr;
}

absl::Time VersionSwitch::LaunchTime(absl::Time now) const {
  const Slot* slot = FindFreeSlot();
  return slot == nullptr ? absl::InfiniteFuture() : LaunchTimeIn(*slot, now);
}

absl::Time VersionSwitch::LaunchTimeIn(const Slot& slot, absl::Time now) const {
  return live_->launch_rule.LaunchTime(queue_, slot.replica.in_flight, slot.replica.idle_time(),
                                       now);
}

bool VersionSwitch::MayLaunch(const VersionReplicas& version) const {
  return IsTurnOf(version) && !(&version == retiring_ ? retiring_queue_ : queue_).empty();
}

void VersionSwitch::CountBatch(const VersionReplicas& version) {
  turn_batches_ = std::exchange(turn_, &version) == &version ? turn_batches_ + 1 : 1;
}

bool VersionSwitch::IsTurnOf(const VersionReplicas& version) const {
  const VersionReplicas* other = &version == live_ ? retiring_ : live_;
  if (other == nullptr || !(version.waits_for_peers && other->waits_for_peers)) return true;
  if (other->NumInFlight() > 0) return false;
  const RowQueue& others_queue = other == live_ ? queue_ : retiring_queue_;
  const auto turn_batches_max = kTurnBatches * static_cast<int64_t>(version.replicas.size());
  return turn_ != &version || turn_batches_ < turn_batches_max || others_queue.empty() ||
         other->NumHealthy() == 0;
}

}  // namespace logprobd
