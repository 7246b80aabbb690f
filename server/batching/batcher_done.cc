// The end of batches and requests in a Batcher: scatters scores, releases limits, calls callbacks.

#include <algorithm>
#include <utility>

#include "server/base/errors.h"
#include "server/batching/batcher_impl.h"

namespace logprobd {
namespace {

/// Adds a batch with rows of a request to the request's times.
void AddBatch(const BatchSlot& batch, StageTimes& times) {
  times.first_cut = std::min(times.first_cut, batch.cut_time);
  times.last_cut = std::max(times.last_cut, batch.cut_time);
  times.first_start = std::min(times.first_start, batch.start_time);
  times.last_start = std::max(times.last_start, batch.start_time);
  times.last_end = std::max(times.last_end, batch.end_time);
  times.kernel_seconds += batch.kernel_seconds;
}

}  // namespace

void Batcher::Impl::OnBatchDone(Slot& slot, const absl::Status& engine_status) {
  BatchSlot& batch = slot.batch;
  batch.end_time = clock_.Now();
  const absl::Status status = WithDetailsForLog(engine_status);
  if (status.ok()) {
    RecordEngineStages(batch.batch());
    batch.kernel_seconds += batch.batch().kernel_seconds;
  }
  bool relaunch = false;
  if (absl::IsResourceExhausted(status) && batch.CanHalve()) {
    batch.Halve();
    relaunch = true;
  } else {
    relaunch = batch.NextHalf(status);
  }
  if (relaunch) {
    // Only the batch thread may start batches: an engine takes one caller at a time.
    const absl::MutexLock lock(&mutex_);
    slot.state = SlotState::kRelaunch;
    WakeLocked();
    return;
  }

  turns_.GiveBack(slot.replica.index);
  slot.scattered.clear();
  for (const BatchPart& part : batch.parts()) {
    slot.scattered.push_back(batch.StatusOf(part).ok() ? ScatterPart(batch, part)
                                                       : ScatteredPart());
  }
  batch.ReleaseLargeArrays();
  std::vector<Ending> endings;
  std::vector<HiddenPayload> payloads;
  std::vector<BatchPart> parts;
  {
    const absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_.Now();
    EndBatchLocked(slot, now, endings, payloads);
    parts = batch.TakeParts();
    slot.state = SlotState::kFree;
    slot.replica.NoteEnd(now);
    ++answering_;
    if (versions_.has_rows()) WakeLocked();
  }
  payloads.clear();
  AnswerAll(std::move(endings));
  parts.clear();
  const absl::MutexLock lock(&mutex_);
  --answering_;
  // The batch thread updates the gauges. It is woken only now because, with few cores, it would
  // otherwise delay the answers.
  WakeLocked();
  UpdateIdleLocked();
}

void Batcher::Impl::RecordEngineStages(const ScoreBatch& batch) {
  const auto record = [this](Metrics::Stage stage, double seconds) {
    if (seconds > 0) {  // Zero means that the engine does not have this stage.
      metrics_.RecordStage(stage, seconds);
    }
  };
  record(Metrics::Stage::kH2d, batch.h2d_seconds);
  record(Metrics::Stage::kKernel, batch.kernel_seconds);
  record(Metrics::Stage::kCombine, batch.combine_seconds);
  record(Metrics::Stage::kD2h, batch.d2h_seconds);
}

void Batcher::Impl::EndBatchLocked(Slot& slot, absl::Time now, std::vector<Ending>& endings,
                                   std::vector<HiddenPayload>& payloads) {
  const BatchSlot& batch = slot.batch;
  const double engine_seconds = absl::ToDoubleSeconds(batch.end_time - batch.start_time);
  bool all_scored = true;
  for (size_t i = 0; i < batch.parts().size(); ++i) {
    const BatchPart& part = batch.parts()[i];
    PendingRequest& pending = *part.pending;
    --pending.parts_in_flight;
    if (part.is_in_place) EndReadLocked(pending, payloads);
    absl::Status status = batch.StatusOf(part);
    all_scored = all_scored && status.ok();
    if (pending.is_answered) {
      ReleaseHeldLocked(pending);
      continue;
    }
    if (!status.ok()) {
      if (absl::IsResourceExhausted(status)) {
        status = WithRetryAfter(std::move(status),
                                rate_.RetryAfter(static_cast<double>(batch.num_rows())));
      }
      EndLocked(part.pending, std::move(status), endings);
      continue;
    }
    const ScatteredPart& scattered = slot.scattered[i];
    pending.scored_rows += part.num_rows;
    pending.nonfinite_rows += scattered.nonfinite_rows;
    if (scattered.nonfinite_rows > 0) {
      pending.first_nonfinite_row =
          std::min(pending.first_nonfinite_row, scattered.first_nonfinite_row);
    }
    StageSeconds& stages = pending.stages;
    stages.queue =
        std::max(stages.queue, absl::ToDoubleSeconds(batch.cut_time - pending.submitted));
    stages.copy = std::max(stages.copy, batch.copy_seconds);
    stages.engine = std::max(stages.engine, engine_seconds);
    if (pending.request.trace) AddBatch(batch, pending.times);
    if (pending.next_row == pending.request.rows && pending.parts_in_flight == 0) {
      EndLocked(part.pending, absl::OkStatus(), endings);
    }
  }
  if (all_scored && &slot.version == versions_.live()) {
    rate_.AddBatch(batch.num_rows(), batch.start_time, now, slot.replica.index);
  }
}

void Batcher::Impl::EndLocked(const Pending& pending, absl::Status status,
                              std::vector<Ending>& endings) {
  const ScoreRequest& request = pending->request;
  pending->is_answered = true;
  requests_.erase(pending->ticket);
  deadlines_.erase({request.deadline, pending->ticket});
  if (pending->is_queued) {
    admission_.Release(request.client_id, request.priority(),
                       QueueLoad{.rows = pending->waiting_rows});
    versions_.QueueOf(*pending).Remove(*pending);
  }
  Ending ending{.pending = pending, .status = std::move(status), .payload = {}};
  if (pending->payload_readers == 0) {
    ending.payload = std::exchange(pending->request.hidden, HiddenPayload());
  }
  endings.push_back(std::move(ending));
}

void Batcher::Impl::EndReadLocked(PendingRequest& pending, std::vector<HiddenPayload>& payloads) {
  --pending.payload_readers;
  if (pending.payload_readers == 0 &&
      (pending.is_answered || pending.next_row == pending.request.rows)) {
    ReleasePayloadLocked(pending);
    payloads.push_back(std::exchange(pending.request.hidden, HiddenPayload()));
  }
}

void Batcher::Impl::ReleasePayloadLocked(PendingRequest& pending) {
  if (pending.is_charged) {
    pending.is_charged = false;
    admission_.Release(pending.request.client_id, pending.request.priority(),
                       QueueLoad{.bytes = pending.payload_bytes, .requests = 1});
  }
}

void Batcher::Impl::ReleaseHeldLocked(PendingRequest& pending) {
  if (pending.is_finished && pending.parts_in_flight == 0 && pending.held_bytes > 0) {
    admission_.Release(pending.request.client_id, pending.request.priority(),
                       QueueLoad{.bytes = std::exchange(pending.held_bytes, 0)});
  }
}

void Batcher::Impl::AnswerAll(std::vector<Ending> endings) {
  if (endings.empty()) return;
  for (Ending& ending : endings) ending.payload = HiddenPayload();
  {
    // Releases the limits before the callbacks: an answered client may send its next request at
    // once.
    const absl::MutexLock lock(&mutex_);
    for (const Ending& ending : endings) {
      PendingRequest& pending = *ending.pending;
      pending.is_finished = true;
      if (pending.payload_readers == 0) {  // Otherwise the last reader releases it.
        ReleasePayloadLocked(pending);
      }
      ReleaseHeldLocked(pending);
    }
  }
  CallBack(endings);
}

void Batcher::Impl::CallBack(std::vector<Ending>& endings) {
  constexpr size_t kEndingsOfTask = 4;
  const size_t num_tasks = (endings.size() + kEndingsOfTask - 1) / kEndingsOfTask;
  if (num_tasks < 2 || is_answer_pool_taken_.exchange(true, std::memory_order_acquire)) {
    for (Ending& ending : endings) Answer(ending);
    return;
  }
  answer_pool_.Run(static_cast<int64_t>(num_tasks), [&](int64_t task) {
    const size_t begin = static_cast<size_t>(task) * kEndingsOfTask;
    const size_t end = std::min(begin + kEndingsOfTask, endings.size());
    for (size_t i = begin; i < end; ++i) Answer(endings[i]);
  });
  is_answer_pool_taken_.store(false, std::memory_order_release);
}

void Batcher::Impl::Answer(Ending& ending) {
  PendingRequest& pending = *ending.pending;
  const ScoreRequest& request = pending.request;
  if (absl::IsDeadlineExceeded(ending.status)) {
    metrics_.RecordDeadlineExceeded(pending.next_row < request.rows ? Metrics::LeftAt::kQueue
                                                                    : Metrics::LeftAt::kEngine);
  }
  if (!ending.status.ok()) {
    std::move(pending.done)(std::move(ending.status));
    return;
  }
  if (pending.scored_rows == 0) {
    PrepareResult(pending, pending.result.weights_version);  // No batch has prepared it.
  }
  const absl::Time received =
      request.received == absl::Time() ? pending.submitted : request.received;
  pending.stages.total = absl::ToDoubleSeconds(clock_.Now() - received);
  metrics_.RecordStage(Metrics::Stage::kQueue, pending.stages.queue);
  absl::StatusOr<ScoreResult> result = FinishResult(pending);
  if (result.ok()) {
    metrics_.RecordRows(options_.head, pending.scored_rows - pending.nonfinite_rows,
                        request.rows - pending.scored_rows, pending.nonfinite_rows);
  }
  std::move(pending.done)(std::move(result));
}

bool Batcher::Impl::IsIdleLocked() const {
  return requests_.empty() && endings_.empty() && answering_ == 0 && versions_.NumInFlight() == 0;
}

void Batcher::Impl::UpdateIdleLocked() {
  is_idle_ = IsIdleLocked();
  if (is_stopping_) WakeLocked();
}

}  // namespace logprobd
