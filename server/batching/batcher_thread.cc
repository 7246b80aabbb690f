// The batch thread of a Batcher: it cuts, gathers and starts batches, expires deadlines, and calls
// the callbacks of requests that end without the engine.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/errors.h"
#include "server/base/start_thread.h"
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

Batcher::Impl::Impl(const Options& options, const HeadInfo& head, const Clock& clock,
                    Metrics& metrics)
    : options_(options),
      clock_(clock),
      metrics_(metrics),
      hidden_size_(head.hidden_size),
      weights_version_(head.weights_version),
      copy_pool_(options.copy_threads),
      gather_(copy_pool_),
      admission_(AdmissionLimits(options)),
      rate_(std::max<int64_t>(options.batch_rows_max / 4, 1)),
      launch_rule_(options.batch_rows_max,
                   std::min(options.batch_rows_max, StagingBytes(options.batch_rows_max, head) /
                                                        (hidden_size_ * DtypeBytes(Dtype::kF32))),
                   options.batch_wait_max) {}

void Batcher::Impl::AddReplica(ScoringEngine& engine,
                               std::vector<std::unique_ptr<StagingBuffer>> staging) {
  const auto index = static_cast<int>(replicas_.size());
  replicas_.push_back(std::make_unique<Replica>(Replica{.engine = engine, .index = index}));
  for (std::unique_ptr<StagingBuffer>& buffer : staging) {
    slots_.push_back(std::make_unique<Slot>(*replicas_.back(), std::move(buffer)));
  }
}

absl::Status Batcher::Impl::Start() {
  LOGPROBD_ASSIGN_OR_RETURN(thread_, StartThread("batch", [this] { Run(); }));
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
    clock_.AwaitUntil(mutex_, absl::Condition(&wake_), wake_time_);
  }
}

bool Batcher::Impl::DoNextLocked() {
  const absl::Time now = clock_.Now();
  ExpireDeadlinesLocked(now);
  if (!queue_.empty()) {
    if (is_stopping_) {
      EndQueuedLocked(absl::UnavailableError("the server is shutting down"));
    } else if (NumHealthy() == 0) {
      EndQueuedLocked(absl::UnavailableError("the engine has failed: retry on another server"));
    }
  }
  if (!endings_.empty()) {
    AnswerEndingsLocked();
    return true;
  }
  if (Slot* slot = FindRelaunchLocked(); slot != nullptr) {
    RelaunchLocked(*slot);
    return true;
  }
  if (Slot* slot = FindFreeSlotLocked();
      slot != nullptr && launch_rule_.LaunchTime(queue_, slot->replica.in_flight, now) <= now) {
    LaunchLocked(*slot, now);
    return true;
  }
  return PublishGaugesLocked(now);
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

void Batcher::Impl::EndQueuedLocked(const absl::Status& status) {
  while (!queue_.empty()) {
    const Pending pending = requests_.at(queue_.Oldest()->ticket);
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

void Batcher::Impl::LaunchLocked(Slot& slot, absl::Time now) {
  std::vector<BatchPart> parts = queue_.Cut(launch_rule_.Budget(queue_, now));
  LOGPROBD_CHECK(!parts.empty(), queue_.rows());
  for (const BatchPart& part : parts) {
    PendingRequest& pending = *part.pending;
    ++pending.parts_in_flight;
    pending.is_gathering = true;
    admission_.Release(pending.request.client_id, pending.request.priority(),
                       QueueLoad{.rows = part.num_rows});
  }
  slot.state = SlotState::kInFlight;
  slot.batch.cut_time = now;
  ++slot.replica.in_flight;

  mutex_.Unlock();
  FillBatch(slot, std::move(parts));
  mutex_.Lock();
  std::vector<HiddenPayload> payloads;
  if (!FinishGatherLocked(slot, payloads)) {
    DropBatchLocked(slot);
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
}

void Batcher::Impl::FillBatch(Slot& slot, std::vector<BatchPart> parts) {
  for (const BatchPart& part : parts) {
    if (part.pending->piece_offsets.empty()) {
      IndexPieces(*part.pending);
      PrepareResult(*part.pending, weights_version_);
    }
  }
  slot.batch.Fill(std::move(parts), hidden_size_);
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
    pending.is_gathering = false;
    if (pending.is_answered || pending.next_row == pending.request.rows) {
      ReleasePayloadLocked(pending);
      payloads.push_back(std::exchange(pending.request.hidden, HiddenPayload()));
    }
    is_wanted = is_wanted || (!pending.is_answered && pending.request.deadline > now);
  }
  return is_wanted;
}

void Batcher::Impl::DropBatchLocked(Slot& slot) {
  // The deadlines of those not answered have passed. They are ended before the lock is released, or
  // a batch with their earlier rows could answer them as complete.
  ExpireDeadlinesLocked(clock_.Now());
  std::vector<BatchPart> parts = slot.batch.TakeParts();
  for (const BatchPart& part : parts) {
    --part.pending->parts_in_flight;
    ReleaseHeldLocked(*part.pending);
  }
  slot.state = SlotState::kFree;
  --slot.replica.in_flight;
  mutex_.Unlock();
  parts.clear();
  slot.batch.ReleaseLargeArrays();
  mutex_.Lock();
  UpdateIdleLocked();
}

void Batcher::Impl::RelaunchLocked(Slot& slot) {
  slot.state = SlotState::kInFlight;
  mutex_.Unlock();
  StartBatch(slot);
  mutex_.Lock();
}

bool Batcher::Impl::PublishGaugesLocked(absl::Time now) {
  const bool has_age = !queue_.empty();
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
  const double age = has_age ? absl::ToDoubleSeconds(now - queue_.OldestSubmitted()) : 0;
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
  if (!queue_.empty()) {
    wake = std::min(wake, published_time_ + kGaugePeriod);
  }
  if (const Slot* slot = FindFreeSlotLocked(); slot != nullptr) {
    wake = std::min(wake, launch_rule_.LaunchTime(queue_, slot->replica.in_flight, now));
  }
  return wake;
}

Batcher::Impl::Slot* Batcher::Impl::FindRelaunchLocked() const {
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (slot->state == SlotState::kRelaunch) {
      return slot.get();
    }
  }
  return nullptr;
}

int Batcher::Impl::NumHealthy() const {
  return static_cast<int>(
      std::count_if(replicas_.begin(), replicas_.end(),
                    [](const auto& replica) { return replica->engine.healthy(); }));
}

/// A slot of the healthy replica with the fewest batches in flight, null if all have both. Of
/// equals the first: a row's scores are the same wherever it is scored, so taking turns would only
/// add state.
Batcher::Impl::Slot* Batcher::Impl::FindFreeSlotLocked() const {
  Slot* best = nullptr;
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (slot->state == SlotState::kFree &&
        (best == nullptr || slot->replica.in_flight < best->replica.in_flight) &&
        slot->replica.engine.healthy()) {
      best = slot.get();
    }
  }
  return best;
}

}  // namespace logprobd
