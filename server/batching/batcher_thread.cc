// The batch thread of a Batcher: it cuts, gathers and starts batches, expires deadlines, and calls
// the callbacks of requests that end without the engine.

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/batching/batcher_impl.h"

namespace logprobd {
namespace {

/// How often the age of the oldest request is refreshed while it waits.
constexpr absl::Duration kGaugePeriod = absl::Seconds(1);

}  // namespace

Admission::Limits AdmissionLimits(const Batcher::Options& options) {
  return {.total = {.rows = options.queue_rows_max,
                    .bytes = options.queue_bytes_max,
                    .requests = options.queue_requests_max},
          .client_share = options.client_share_max};
}

Batcher::Impl::Impl(const Options& options, VersionReplicas& first, const Clock& clock,
                    Metrics& metrics)
    : options_(options),
      clock_(clock),
      metrics_(metrics),
      hidden_size_(first.hidden_size),
      copy_pool_("copy", options.copy_threads),
      gather_(copy_pool_),
      answer_pool_("answer", options.answer_threads),
      live_(&first),
      version_(first.weights_version),
      rate_kind_(first.kind),
      admission_(AdmissionLimits(options)),
      rate_(std::max<int64_t>(options.batch_rows_max / 4, 1)),
      wait_max_(options.batch_wait_max) {}

absl::Status Batcher::Impl::Start() {
  if (options_.turns != nullptr) {
    options_.turns->SetWake(options_.turns_head, [this] {
      const absl::MutexLock lock(&mutex_);
      wake_ = true;
    });
  }
  absl::StatusOr<std::thread> thread = StartThread("batch", [this] { Run(); });
  if (!thread.ok()) {
    Stop();
    return thread.status();
  }
  thread_ = *std::move(thread);
  return absl::OkStatus();
}

void Batcher::Impl::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
    wake_ = true;
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  if (options_.turns != nullptr) {
    options_.turns->SetWake(options_.turns_head, nullptr);
  }
}

void Batcher::Impl::Run() {
  absl::MutexLock lock(&mutex_);
  while (true) {
    wake_ = false;
    if (DoNextLocked()) {
      continue;
    }
    if (is_stopping_ && is_idle_) {
      return;
    }
    wake_time_ = NextWakeLocked(clock_.Now());
    AwaitWakeLocked();
  }
}

/// Looks for a while, then sleeps, until there is something to do or wake_time_ has come.
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
  // The retiring version's first: its engines go when they are done, and no more company comes.
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

/// Launches a batch of `queue` in `slot`, or where devices are shared in another one of its
/// generation, in turn; whether anything was done.
bool Batcher::Impl::LaunchFromLocked(RowQueue& queue, Slot& slot, absl::Time now) {
  if (options_.turns != nullptr) {
    return LaunchInTurnLocked(queue, slot.generation);
  }
  LaunchLocked(queue, slot, now);
  return true;
}

/// Ends what waits for engines that will not score it.
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
      queue.Cut(slot.generation.launch_rule.CutBudget(queue, slot.replica.in_flight, now));
  LOGPROBD_CHECK(!parts.empty(), queue.rows());
  launching_ = &slot.generation;
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
  // From here on the slot is the engine's thread's.
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
      PrepareResult(*part.pending, slot.generation.weights_version);
    }
  }
  slot.batch.Fill(std::move(parts), hidden_size_, slot.generation.reads_in_place);
  const absl::Time begin = clock_.Now();
  gather_.Gather(slot.batch.parts(), slot.batch.row_bytes(), slot.batch.staging());
  slot.batch.copy_seconds = absl::ToDoubleSeconds(clock_.Now() - begin);
}

void Batcher::Impl::StartBatch(Slot& slot) {
  ScoringEngine& engine = slot.replica.engine;
  if (!engine.healthy()) {
    // Since the cut, or since the half before. The rows lie in memory of this replica alone.
    OnBatchDone(slot, absl::UnavailableError("the engine that had the rows has failed: retry"));
    return;
  }
  engine.Start(slot.batch.batch(),
               [this, &slot](const absl::Status& status) { OnBatchDone(slot, status); });
}

bool Batcher::Impl::FinishGatherLocked(Slot& slot, std::vector<HiddenPayload>& payloads) {
  const absl::Time now = clock_.Now();
  bool is_wanted = false;
  for (const BatchPart& part : slot.batch.parts()) {
    PendingRequest& pending = *part.pending;
    if (!part.is_in_place) {
      EndReadLocked(pending, payloads);
    }
    is_wanted = is_wanted || (!pending.is_answered && pending.request.deadline > now);
  }
  return is_wanted;
}

void Batcher::Impl::DropBatchLocked(Slot& slot, std::vector<HiddenPayload> payloads) {
  // The deadlines of those not answered have passed. They are ended before the lock is released, or
  // a batch with their earlier rows could answer them as complete.
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
  launching_ = &slot.generation;
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
  return slot.generation.launch_rule.LaunchTime(queue_, slot.replica.in_flight,
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
  for (const VersionReplicas* generation : {retiring_, live_}) {
    if (generation != nullptr) {
      if (Slot* slot = generation->FindRelaunch(); slot != nullptr) {
        return slot;
      }
    }
  }
  return nullptr;
}

Batcher::Impl::Slot* Batcher::Impl::FindFreeSlotLocked() const {
  return live_ != nullptr && IsTurnOfLocked(*live_) ? live_->FindFreeSlot() : nullptr;
}

}  // namespace logprobd
