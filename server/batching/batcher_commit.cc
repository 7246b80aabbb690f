// The change from one generation of engines to the next in a Batcher.

#include <algorithm>
#include <vector>

#include "server/base/errors.h"
#include "server/batching/batcher_impl.h"

namespace logprobd {
namespace {

/// Batches of a turn, for each replica, while the other generation waits for the same devices.
constexpr int64_t kTurnBatches = ScoringEngine::kBatchesInFlight;

}  // namespace

void Batcher::Impl::Commit(VersionReplicas* next) {
  absl::MutexLock lock(&mutex_);
  LOGPROBD_CHECK(retiring_ == nullptr, "the generation before has not retired");
  LOGPROBD_CHECK(next == nullptr || next->hidden_size == hidden_size_);
  retiring_ = live_;
  live_ = next;
  failure_ = absl::OkStatus();
  if (retiring_ != nullptr) {
    std::vector<Pending> bound;
    for (const auto& [ticket, pending] : requests_) {
      if (pending->is_queued && (pending->has_begun() || pending->request.weights_version != 0)) {
        bound.push_back(pending);
      }
    }
    std::sort(bound.begin(), bound.end(), [](const Pending& a, const Pending& b) {
      return a->ticket < b->ticket;  // the order in which they came
    });
    for (const Pending& pending : bound) {
      queue_.Remove(*pending);
      pending->is_retiring = true;
      retiring_queue_.Push(pending);
    }
  }
  if (live_ != nullptr) {
    version_ = live_->weights_version;
    live_->launch_rule.set_wait_max(wait_max_);
    if (rate_kind_ != live_->kind) {  // what was measured says nothing of it
      rate_kind_ = live_->kind;
      rate_ = DrainRate(std::max<int64_t>(options_.batch_rows_max / 4, 1));
    }
  }
  wake_ = true;
}

void Batcher::Impl::AwaitRetired() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &Impl::IsRetiredLocked));
  turn_ = turn_ == retiring_ ? nullptr : turn_;
  retiring_ = nullptr;
  wake_ = true;  // the live one may have waited for its devices
}

bool Batcher::Impl::IsRetiredLocked() const {
  return retiring_ == nullptr ||
         (retiring_queue_.empty() && retiring_->NumInFlight() == 0 && launching_ != retiring_);
}

void Batcher::Impl::Fail(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  LOGPROBD_CHECK(live_ == nullptr && !why.ok(), why.message());
  failure_ = why;
  EndQueuedLocked(queue_, why);
  wake_ = true;
}

/// Whether a batch of `generation` may be started: always, unless one of another could wait on the
/// same devices for kernels that cannot begin before it ends. Then both take turns of a few batches
/// and begin one when the other has nothing in flight.
bool Batcher::Impl::IsTurnOfLocked(const VersionReplicas& generation) const {
  const VersionReplicas* other = &generation == live_ ? retiring_ : live_;
  if (other == nullptr || !(generation.waits_for_peers && other->waits_for_peers)) {
    return true;
  }
  if (other->NumInFlight() > 0) {
    return false;
  }
  const RowQueue& others_queue = other == live_ ? queue_ : retiring_queue_;
  const auto turn_batches_max = kTurnBatches * static_cast<int64_t>(generation.replicas.size());
  return turn_ != &generation || turn_batches_ < turn_batches_max || others_queue.empty() ||
         other->NumHealthy() == 0;
}

RowQueue& Batcher::Impl::QueueOfLocked(const PendingRequest& pending) {
  return pending.is_retiring ? retiring_queue_ : queue_;
}

RowQueue& Batcher::Impl::QueueOfLocked(const VersionReplicas& generation) {
  return &generation == retiring_ ? retiring_queue_ : queue_;
}

bool Batcher::Impl::IsQueueEmptyLocked() const { return queue_.empty() && retiring_queue_.empty(); }

}  // namespace logprobd
