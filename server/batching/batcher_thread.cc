// The batch thread of a Batcher: it cuts, gathers and starts batches, ends requests whose deadline
// passes, and calls the callbacks of requests that end without the engine. launch_rule.h decides
// when a batch may be launched, version_switch.h which version launches it.

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/batching/batcher_impl.h"

namespace logprobd {
namespace {

/// Interval at which the age of the oldest request is updated while it waits.
constexpr absl::Duration kGaugePeriod = absl::Seconds(1);

}  // namespace

void Batcher::Impl::Run() {
  const absl::MutexLock lock(&mutex_);
  while (true) {
    wake_ = false;
    heartbeat_->Begin();
    if (DoNextLocked()) continue;
    const bool is_over = is_stopping_ && is_idle_;
    if (is_over || !wake_) heartbeat_->End();
    if (is_over) return;
    wake_time_ = NextWakeLocked(clock_.Now());
    AwaitWakeLocked();
  }
}

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
  if (Slot* slot = versions_.FindRelaunch(); slot != nullptr) {
    RelaunchLocked(*slot);
    return true;
  }
  return LaunchNextLocked(now) || PublishGaugesLocked(now);
}

bool Batcher::Impl::LaunchNextLocked(absl::Time now) {
  Slot* const slot = versions_.FindLaunch(now);
  if (slot == nullptr) return WithdrawLocked();
  if (turns_.is_sharing()) return LaunchInTurnLocked(slot->version);
  LaunchLocked(*slot, now);
  return true;
}

void Batcher::Impl::EndUnservableLocked() {
  if (is_stopping_) {
    const absl::Status stopping = absl::UnavailableError("the server is shutting down");
    EndQueuedLocked(versions_.queue(), stopping);
    EndQueuedLocked(versions_.retiring_queue(), stopping);
    return;
  }
  while (RowQueue* const queue = versions_.FindUnservable()) {
    EndQueuedLocked(*queue, EngineFailed());
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
  for (const Pending& pending : queue.Queued()) EndLocked(pending, status, endings_);
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

void Batcher::Impl::LaunchLocked(Slot& slot, absl::Time now) {
  RowQueue& queue = versions_.QueueOf(slot.version);
  std::vector<BatchPart> parts =
      queue.Cut(slot.version.launch_rule.CutBudget(queue, slot.replica.in_flight, now));
  LOGPROBD_CHECK(!parts.empty(), queue.rows());
  versions_.CountBatch(slot.version);
  versions_.Hold(slot.version);  // The engine may end the batch before Start returns.
  int64_t rows = 0;
  for (const BatchPart& part : parts) {
    rows += part.num_rows;
    PendingRequest& pending = *part.pending;
    ++pending.parts_in_flight;
    ++pending.payload_readers;
    admission_.Release(pending.request.client_id, pending.request.priority(),
                       QueueLoad{.rows = part.num_rows});
  }
  turns_.Charge(rows);
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
    versions_.Unhold();
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
  versions_.Unhold();
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

bool Batcher::Impl::FinishGatherLocked(Slot& slot, std::vector<HiddenPayload>& payloads) {
  const absl::Time now = clock_.Now();
  bool is_needed = false;
  for (const BatchPart& part : slot.batch.parts()) {
    PendingRequest& pending = *part.pending;
    if (!part.is_in_place) EndReadLocked(pending, payloads);
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
    if (part.is_in_place) EndReadLocked(*part.pending, payloads);
    ReleaseHeldLocked(*part.pending);
  }
  slot.state = SlotState::kFree;
  slot.replica.NoteDrop();
  mutex_.Unlock();
  payloads.clear();
  turns_.GiveBack(slot.replica.index);
  parts.clear();
  slot.batch.ReleaseLargeArrays();
  mutex_.Lock();
  UpdateIdleLocked();
}

void Batcher::Impl::RelaunchLocked(Slot& slot) {
  slot.state = SlotState::kInFlight;
  versions_.Hold(slot.version);
  mutex_.Unlock();
  StartBatch(slot);
  mutex_.Lock();
  versions_.Unhold();
}

bool Batcher::Impl::PublishGaugesLocked(absl::Time now) {
  const bool has_age = versions_.has_rows();
  std::array<bool, kNumPriorities> has_changed{};
  bool any = has_age && now - published_time_ >= kGaugePeriod;
  for (size_t i = 0; i < published_.size(); ++i) {
    const QueueLoad& load = admission_.of(static_cast<Priority>(i));
    has_changed[i] = load.rows != published_[i].rows || load.bytes != published_[i].bytes ||
                     load.requests != published_[i].requests;
    published_[i] = load;
    any = any || has_changed[i];
  }
  if (!any) return false;
  published_time_ = now;
  const double age = has_age ? absl::ToDoubleSeconds(now - versions_.OldestSubmitted()) : 0;
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
  if (versions_.has_rows()) wake = std::min(wake, published_time_ + kGaugePeriod);
  if (!turns_.is_waiting()) wake = std::min(wake, versions_.LaunchTime(now));
  return wake;
}

bool Batcher::Impl::LaunchInTurnLocked(VersionReplicas& version) {
  const std::vector<int> replicas = version.FreeReplicas();
  if (replicas.empty()) {
    return WithdrawLocked();  // The last healthy replica has just failed.
  }
  versions_.Hold(version);
  mutex_.Unlock();
  const std::optional<int> replica = turns_.Take(replicas);
  mutex_.Lock();
  versions_.Unhold();
  if (!replica.has_value()) return false;
  // Meanwhile a Commit may have given the rows to another version, or they may have ended.
  if (is_stopping_ || !versions_.MayLaunch(version)) {
    mutex_.Unlock();
    turns_.GiveBack(*replica);
    mutex_.Lock();
    return true;
  }
  LaunchLocked(version.FreeSlotOf(*replica), clock_.Now());  // Only this thread takes slots.
  return true;
}

bool Batcher::Impl::WithdrawLocked() {
  if (!turns_.is_waiting()) return false;
  mutex_.Unlock();
  turns_.Withdraw();
  mutex_.Lock();
  return true;
}

}  // namespace logprobd
