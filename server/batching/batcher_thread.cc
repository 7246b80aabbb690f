// The batch thread of a Batcher: it cuts, gathers and starts batches, ends requests whose deadline
// passes, and calls the callbacks of requests that end without the engine. launch_rule.h decides
// when a batch may be launched; the end of this file decides which version or head launches next.

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/batching/batcher_impl.h"

namespace logprobd {
namespace {

/// Interval at which the age of the oldest request is updated while it waits.
constexpr absl::Duration kGaugePeriod = absl::Seconds(1);

/// Number of batches per replica that one version launches in a row while another version waits for
/// the same devices.
constexpr int64_t kTurnBatches = ScoringEngine::kBatchesInFlight;

}  // namespace

void Batcher::Impl::Run() {
  absl::MutexLock lock(&mutex_);
  while (true) {
    wake_ = false;
    heartbeat_->Begin();
    if (DoNextLocked()) {
      continue;
    }
    const bool is_over = is_stopping_ && is_idle_;
    if (is_over || !wake_) {
      heartbeat_->End();
    }
    if (is_over) {
      return;
    }
    wake_time_ = NextWakeLocked(clock_.Now());
    AwaitWakeLocked();
  }
}

/// Busy-polls for at most busy_poll, then sleeps, until there is something to do or wake_time_ is
/// reached.
void Batcher::Impl::AwaitWakeLocked() {
  if (options_.busy_poll > absl::ZeroDuration()) {
    const absl::Time until = std::min(clock_.Now() + options_.busy_poll, wake_time_);
    mutex_.Unlock();
    while (!wake_.load(std::memory_order_acquire) && clock_.Now() < until) {
      std::this_thread::yield();
    }
    mutex_.Lock();
  }
  const auto has_work = +[](std::atomic<bool>* wake) { return wake->load(); };
  clock_.AwaitUntil(mutex_, absl::Condition(has_work, &wake_), wake_time_);
}

bool Batcher::Impl::DoNextLocked() {
  const absl::Time now = clock_.Now();
  ExpireDeadlinesLocked(now);
  EndUnservableLocked();
  if (!endings_.empty()) {
    AnswerEndingsLocked();
    return true;
  }
  if (Slot* slot = FindRelaunchLocked(); slot != nullptr) {
    RelaunchLocked(*slot);
    return true;
  }
  return LaunchNextLocked(now) || PublishGaugesLocked(now);
}

bool Batcher::Impl::LaunchNextLocked(absl::Time now) {
  // Rows of the retiring version are first: its engines are freed when they are done, and waiting
  // would not add rows to their batches.
  if (!retiring_queue_.empty() && IsTurnOfLocked(*retiring_)) {
    if (Slot* slot = retiring_->FindFreeSlot(); slot != nullptr) {
      return LaunchFromLocked(retiring_queue_, *slot, now);
    }
  }
  Slot* slot = FindFreeSlotLocked();
  if (slot == nullptr || LaunchTimeLocked(*slot, now) > now) {
    return WithdrawLocked();
  }
  return LaunchFromLocked(queue_, *slot, now);
}

/// Launches a batch of `queue` in `slot` or, if heads share devices, in any slot of the same
/// version that gets a turn. Returns whether anything was done.
bool Batcher::Impl::LaunchFromLocked(RowQueue& queue, Slot& slot, absl::Time now) {
  if (options_.turns != nullptr) {
    return LaunchInTurnLocked(queue, slot.version);
  }
  LaunchLocked(queue, slot, now);
  return true;
}

/// Ends the waiting requests that no engine will score: all of them when the Batcher stops, and
/// those of a version that has no healthy replica.
void Batcher::Impl::EndUnservableLocked() {
  if (is_stopping_) {
    const absl::Status stopping = absl::UnavailableError("the server is shutting down");
    EndQueuedLocked(queue_, stopping);
    EndQueuedLocked(retiring_queue_, stopping);
    return;
  }
  const absl::Status failed =
      absl::UnavailableError("the engine has failed: retry on another server");
  if (!queue_.empty() && live_ != nullptr && live_->NumHealthy() == 0) {
    EndQueuedLocked(queue_, failed);
  }
  if (!retiring_queue_.empty() && retiring_->NumHealthy() == 0) {
    EndQueuedLocked(retiring_queue_, failed);
  }
}

void Batcher::Impl::ExpireDeadlinesLocked(absl::Time now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto found = requests_.find(deadlines_.begin()->second);
    LOGPROBD_CHECK(found != requests_.end());
    const Pending pending = found->second;
    EndLocked(pending, DeadlinePassed(*pending), endings_);
  }
}

absl::Status Batcher::Impl::DeadlinePassed(const PendingRequest& pending) {
  return absl::DeadlineExceededError(
      pending.waiting_rows > 0
          ? absl::StrCat("the deadline passed while ", pending.waiting_rows, " of ",
                         pending.rows_to_score, " rows waited in the queue")
          : "the deadline passed while the engine scored the rows");
}

void Batcher::Impl::EndQueuedLocked(RowQueue& queue, const absl::Status& status) {
  while (!queue.empty()) {
    const Pending pending = requests_.at(queue.Oldest()->ticket);
    EndLocked(pending, status, endings_);
  }
}

void Batcher::Impl::AnswerEndingsLocked() {
  std::vector<Ending> endings = std::exchange(endings_, {});
  ++answering_;
  mutex_.Unlock();
  AnswerAll(std::move(endings));
  mutex_.Lock();
  --answering_;
  UpdateIdleLocked();
}

void Batcher::Impl::LaunchLocked(RowQueue& queue, Slot& slot, absl::Time now) {
  std::vector<BatchPart> parts =
      queue.Cut(slot.version.launch_rule.CutBudget(queue, slot.replica.in_flight, now));
  LOGPROBD_CHECK(!parts.empty(), queue.rows());
  launching_ = &slot.version;
  turn_batches_ = std::exchange(turn_, launching_) == launching_ ? turn_batches_ + 1 : 1;
  int64_t rows = 0;
  for (const BatchPart& part : parts) {
    rows += part.num_rows;
    PendingRequest& pending = *part.pending;
    ++pending.parts_in_flight;
    ++pending.payload_readers;
    admission_.Release(pending.request.client_id, pending.request.priority(),
                       QueueLoad{.rows = part.num_rows});
  }
  if (options_.turns != nullptr) {
    options_.turns->Charge(options_.turns_head, rows);
  }
  slot.state = SlotState::kInFlight;
  slot.batch.cut_time = now;
  slot.batch.kernel_seconds = 0;
  slot.replica.NoteBegin(now);

  mutex_.Unlock();
  FillBatch(slot, std::move(parts));
  mutex_.Lock();
  std::vector<HiddenPayload> payloads;
  if (!FinishGatherLocked(slot, payloads)) {
    DropBatchLocked(slot, std::move(payloads));
    launching_ = nullptr;
    return;
  }
  slot.batch.start_time = clock_.Now();
  const int64_t num_rows = slot.batch.num_rows();
  const auto num_requests = static_cast<int64_t>(slot.batch.parts().size());
  const double copy_seconds = slot.batch.copy_seconds;
  mutex_.Unlock();
  StartBatch(slot);
  // From here on the slot belongs to the engine's thread.
  payloads.clear();
  metrics_.RecordBatch(options_.head, num_rows, num_requests);
  metrics_.RecordStage(Metrics::Stage::kCopy, copy_seconds);
  mutex_.Lock();
  launching_ = nullptr;
}

void Batcher::Impl::FillBatch(Slot& slot, std::vector<BatchPart> parts) {
  for (const BatchPart& part : parts) {
    if (part.pending->piece_offsets.empty()) {
      IndexPieces(*part.pending);
      PrepareResult(*part.pending, slot.version.weights_version);
    }
  }
  slot.batch.Fill(std::move(parts), hidden_size_, slot.version.reads_in_place);
  const absl::Time begin = clock_.Now();
  gather_.Gather(slot.batch.parts(), slot.batch.row_bytes(), slot.batch.staging());
  slot.batch.copy_seconds = absl::ToDoubleSeconds(clock_.Now() - begin);
}

void Batcher::Impl::StartBatch(Slot& slot) {
  ScoringEngine& engine = slot.replica.engine;
  if (!engine.healthy()) {
    // The engine failed after the batch was cut, or after its first half. The rows are in memory of
    // this replica, so no other replica can score them.
    OnBatchDone(slot, absl::UnavailableError("the engine that held the rows has failed: retry"));
    return;
  }
  engine.Start(slot.batch.batch(),
               [this, &slot](const absl::Status& status) { OnBatchDone(slot, status); });
}

/// Ends the reads of the payloads that have been copied. Returns false if no request of the batch
/// needs its scores any more.
bool Batcher::Impl::FinishGatherLocked(Slot& slot, std::vector<HiddenPayload>& payloads) {
  const absl::Time now = clock_.Now();
  bool is_needed = false;
  for (const BatchPart& part : slot.batch.parts()) {
    PendingRequest& pending = *part.pending;
    if (!part.is_in_place) {
      EndReadLocked(pending, payloads);
    }
    is_needed = is_needed || (!pending.is_answered && pending.request.deadline > now);
  }
  return is_needed;
}

void Batcher::Impl::DropBatchLocked(Slot& slot, std::vector<HiddenPayload> payloads) {
  // The deadlines of all unanswered requests have passed. They must end before the lock is
  // released: otherwise a batch with their earlier rows could answer them as complete.
  ExpireDeadlinesLocked(clock_.Now());
  std::vector<BatchPart> parts = slot.batch.TakeParts();
  for (const BatchPart& part : parts) {
    --part.pending->parts_in_flight;
    if (part.is_in_place) {
      EndReadLocked(*part.pending, payloads);
    }
    ReleaseHeldLocked(*part.pending);
  }
  slot.state = SlotState::kFree;
  slot.replica.NoteDrop();
  mutex_.Unlock();
  payloads.clear();
  GiveTurnBack(slot);
  parts.clear();
  slot.batch.ReleaseLargeArrays();
  mutex_.Lock();
  UpdateIdleLocked();
}

void Batcher::Impl::RelaunchLocked(Slot& slot) {
  slot.state = SlotState::kInFlight;
  launching_ = &slot.version;
  mutex_.Unlock();
  StartBatch(slot);
  mutex_.Lock();
  launching_ = nullptr;
}

bool Batcher::Impl::PublishGaugesLocked(absl::Time now) {
  const bool has_age = !IsQueueEmptyLocked();
  std::array<bool, kNumPriorities> has_changed{};
  bool any = (has_age && now - published_time_ >= kGaugePeriod) || has_age != has_published_age_;
  for (size_t i = 0; i < published_.size(); ++i) {
    const QueueLoad& load = admission_.of(static_cast<Priority>(i));
    has_changed[i] = load.rows != published_[i].rows || load.bytes != published_[i].bytes ||
                     load.requests != published_[i].requests;
    published_[i] = load;
    any = any || has_changed[i];
  }
  if (!any) {
    return false;
  }
  published_time_ = now;
  has_published_age_ = has_age;
  const double age = has_age ? absl::ToDoubleSeconds(now - OldestSubmittedLocked()) : 0;
  const std::array<QueueLoad, kNumPriorities> loads = published_;
  mutex_.Unlock();
  for (size_t i = 0; i < loads.size(); ++i) {
    if (has_changed[i]) {
      metrics_.SetQueue(
          options_.head, static_cast<Priority>(i),
          {.rows = loads[i].rows, .bytes = loads[i].bytes, .requests = loads[i].requests});
    }
  }
  metrics_.SetQueueOldestAge(options_.head, age);
  mutex_.Lock();
  return true;
}

absl::Time Batcher::Impl::NextWakeLocked(absl::Time now) const {
  absl::Time wake = deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
  if (!IsQueueEmptyLocked()) {
    wake = std::min(wake, published_time_ + kGaugePeriod);
  }
  if (const Slot* slot = FindFreeSlotLocked(); slot != nullptr && !waits_for_turn_) {
    wake = std::min(wake, LaunchTimeLocked(*slot, now));
  }
  return wake;
}

absl::Time Batcher::Impl::LaunchTimeLocked(const Slot& slot, absl::Time now) const {
  return slot.version.launch_rule.LaunchTime(queue_, slot.replica.in_flight,
                                             slot.replica.idle_time(), now);
}

absl::Time Batcher::Impl::OldestSubmittedLocked() const {
  absl::Time oldest = absl::InfiniteFuture();
  for (const RowQueue* queue : {&queue_, &retiring_queue_}) {
    if (!queue->empty()) {
      oldest = std::min(oldest, queue->OldestSubmitted());
    }
  }
  return oldest;
}

Batcher::Impl::Slot* Batcher::Impl::FindRelaunchLocked() const {
  for (const VersionReplicas* version : {retiring_, live_}) {
    if (version != nullptr) {
      if (Slot* slot = version->FindRelaunch(); slot != nullptr) {
        return slot;
      }
    }
  }
  return nullptr;
}

Batcher::Impl::Slot* Batcher::Impl::FindFreeSlotLocked() const {
  return live_ != nullptr && IsTurnOfLocked(*live_) ? live_->FindFreeSlot() : nullptr;
}

/// Returns whether a batch of `version` may be started. It always may, unless the live and the
/// retiring version share devices and both have kernels that wait for other GPUs: a batch of one
/// could then wait for kernels that the other prevents from starting. In that case the versions
/// take turns of a few batches, and a turn begins only when the other version has no batch in
/// flight.
bool Batcher::Impl::IsTurnOfLocked(const VersionReplicas& version) const {
  const VersionReplicas* other = &version == live_ ? retiring_ : live_;
  if (other == nullptr || !(version.waits_for_peers && other->waits_for_peers)) {
    return true;
  }
  if (other->NumInFlight() > 0) {
    return false;
  }
  const RowQueue& others_queue = other == live_ ? queue_ : retiring_queue_;
  const auto turn_batches_max = kTurnBatches * static_cast<int64_t>(version.replicas.size());
  return turn_ != &version || turn_batches_ < turn_batches_max || others_queue.empty() ||
         other->NumHealthy() == 0;
}

RowQueue& Batcher::Impl::QueueOfLocked(const PendingRequest& pending) {
  return pending.is_retiring ? retiring_queue_ : queue_;
}

RowQueue& Batcher::Impl::QueueOfLocked(const VersionReplicas& version) {
  return &version == retiring_ ? retiring_queue_ : queue_;
}

bool Batcher::Impl::IsQueueEmptyLocked() const { return queue_.empty() && retiring_queue_.empty(); }

/// Launches the next batch if this head gets a turn on the shared devices; otherwise the head waits
/// for one. A turn is taken before the batch is cut and given back when its engine is done. Other
/// heads are woken while no lock is held, because waking them takes their lock. Returns whether
/// anything was done.
bool Batcher::Impl::LaunchInTurnLocked(RowQueue& queue, VersionReplicas& version) {
  std::vector<std::pair<int, int>> free;  // Pairs of batches in flight and replica.
  for (const std::unique_ptr<Slot>& slot : version.slots) {
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
    return WithdrawLocked();  // The last healthy replica has just failed.
  }
  launching_ = &version;  // Keeps the version alive while the mutex is released.
  mutex_.Unlock();
  const std::optional<int> replica = options_.turns->Take(options_.turns_head, replicas);
  mutex_.Lock();
  launching_ = nullptr;
  waits_for_turn_ = !replica.has_value();
  if (!replica.has_value()) {
    return false;
  }
  // Meanwhile a Commit may have given the queue to another version, or the queue may be empty.
  if (&queue != &QueueOfLocked(version) || !IsTurnOfLocked(version) || queue.empty() ||
      is_stopping_) {
    mutex_.Unlock();
    options_.turns->GiveBack(options_.turns_head, *replica);
    mutex_.Lock();
    return true;
  }
  // Only this thread takes slots, so the replica still has a free one.
  const auto slot = absl::c_find_if(version.slots, [&](const auto& candidate) {
    return candidate->state == SlotState::kFree && candidate->replica.index == *replica;
  });
  LaunchLocked(queue, **slot, clock_.Now());
  return true;
}

/// Ends the wait for a turn when there is nothing to launch, because a waiting head keeps devices
/// from others. Returns whether it waited.
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
