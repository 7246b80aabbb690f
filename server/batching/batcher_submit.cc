// What callers' threads do in a Batcher: admit, cancel, change its limits, drain.

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/score_request.h"
#include "server/batching/batcher_impl.h"

namespace logprobd {

absl::StatusOr<RequestTicket> Batcher::Impl::Submit(ScoreRequest request, ScoreCallback done) {
  auto pending = std::make_shared<PendingRequest>();
  pending->request = std::move(request);
  pending->done = std::move(done);
  pending->CountRows();
  pending->payload_bytes = PayloadBytes(pending->request);
  pending->held_bytes = FieldBytes(pending->request) + AnswerBytes(pending->request);

  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = CheckServingLocked(pending->request);
    if (status.ok()) {
      status = AdmitLocked(pending);
    }
    if (status.ok()) {
      return pending->ticket;
    }
  }
  if (absl::IsDeadlineExceeded(status)) {
    metrics_.RecordDeadlineExceeded(Metrics::LeftAt::kArrival);
  }
  return status;
}

absl::Status Batcher::Impl::CheckServingLocked(const ScoreRequest& request) {
  if (live_ != nullptr) {
    const int num_healthy = live_->NumHealthy();
    if (num_healthy == 0) {
      return absl::UnavailableError("the engine has failed: retry on another server");
    }
    rate_.set_num_replicas(num_healthy);
    if (request.hidden.place == PayloadPlace::kDevice && !live_->reads_in_place) {
      return absl::FailedPreconditionError(
          "cuda_ipc: this head is not scored on a GPU: send the rows as hidden or in shared "
          "memory");
    }
  } else if (!failure_.ok()) {
    return failure_;
  }
  if (is_draining_ || is_stopping_) {
    return WithRejection(
        absl::UnavailableError("the server is shutting down: retry on another server"),
        Rejection::kDraining);
  }
  // Under the lock under which the version changes: what was validated against the version before
  // may not be scored with the next.
  if (request.weights_version == 0 ||
      (live_ != nullptr && request.weights_version == live_->weights_version)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("weights_version: ", request.weights_version, ", but ",
                   live_ == nullptr ? "the weights are being replaced"
                                    : absl::StrCat("version ", live_->weights_version, " is live"),
                   " for head \"", options_.head, "\""));
}

absl::Status Batcher::Impl::AdmitLocked(const Pending& pending) {
  const ScoreRequest& request = pending->request;
  const absl::Time now = clock_.Now();
  LOGPROBD_RETURN_IF_ERROR(CheckDeadlineLocked(*pending, now));
  const QueueLoad load{.rows = pending->rows_to_score,
                       .bytes = pending->payload_bytes + pending->held_bytes,
                       .requests = 1};
  LOGPROBD_RETURN_IF_ERROR(admission_.CheckPossible(load));
  LOGPROBD_RETURN_IF_ERROR(admission_.Admit(request.client_id, request.priority(), load, rate_));
  pending->is_charged = true;

  pending->ticket = ++last_ticket_;
  pending->submitted = now;
  requests_.emplace(pending->ticket, pending);
  is_idle_ = false;
  if (pending->rows_to_score == 0) {
    pending->result.weights_version = version_;
    EndLocked(pending, absl::OkStatus(), endings_);
    wake_ = true;
    return absl::OkStatus();
  }
  if (request.deadline != absl::InfiniteFuture()) {
    deadlines_.emplace(request.deadline, pending->ticket);
  }
  if (pending->is_small() && live_ != nullptr) {
    live_->launch_rule.NoteSmallRequest(now);
  }
  // The batch thread is woken only if this request changes what it waits for.
  const bool was_empty = queue_.empty();
  queue_.Push(pending);
  const Slot* slot = FindFreeSlotLocked();
  const bool may_launch =
      slot != nullptr && !waits_for_turn_ && LaunchTimeLocked(*slot, now) <= now;
  wake_ = wake_ || was_empty || may_launch || request.deadline < wake_time_;
  return absl::OkStatus();
}

absl::Status Batcher::Impl::CheckDeadlineLocked(const PendingRequest& pending,
                                                absl::Time now) const {
  const ScoreRequest& request = pending.request;
  if (request.deadline <= now) {
    return absl::DeadlineExceededError("the deadline had passed on arrival");
  }
  if (request.deadline == absl::InfiniteFuture()) {
    return absl::OkStatus();
  }
  if (const Slot* slot = FindFreeSlotLocked();
      queue_.empty() && slot != nullptr && slot->replica.in_flight == 0) {
    return absl::OkStatus();  // trying costs nobody anything, and shows how fast the engine is now
  }
  // A lower bound: what this client has queued before it must leave first, at best at full speed.
  const int64_t rows = pending.rows_to_score +
                       queue_.ClientRows(request.client_id, request.priority(), pending.is_small());
  const std::optional<absl::Duration> wait = rate_.LeastTimeFor(static_cast<double>(rows), now);
  if (wait.has_value() && now + *wait > request.deadline) {
    return absl::DeadlineExceededError(absl::StrCat(
        "the deadline is ", absl::FormatDuration(request.deadline - now), " away, but ", rows,
        " rows of this client take at least ", absl::FormatDuration(*wait)));
  }
  return absl::OkStatus();
}

void Batcher::Impl::Cancel(RequestTicket ticket) {
  auto left_at = Metrics::LeftAt::kQueue;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = requests_.find(ticket);
    if (found == requests_.end()) {
      return;
    }
    const Pending pending = found->second;
    wake_ = true;
    if (IsDue(pending->request.deadline, clock_.Now())) {
      EndLocked(pending, DeadlinePassed(*pending), endings_);
      return;  // counted where it is answered
    }
    if (!pending->is_queued) {
      left_at = Metrics::LeftAt::kEngine;
    }
    EndLocked(pending, absl::CancelledError("the client cancelled the request"), endings_);
  }
  metrics_.RecordCancelled(left_at);
}

void Batcher::Impl::SetLimits(const Options& options) {
  absl::MutexLock lock(&mutex_);
  admission_.SetLimits(AdmissionLimits(options));
  wait_max_ = options.batch_wait_max;
  if (live_ != nullptr) {
    live_->launch_rule.set_wait_max(wait_max_);
  }
  wake_ = true;  // what waits may be due
}

bool Batcher::Impl::Drain(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  is_draining_ = true;
  return clock_.AwaitUntil(mutex_, absl::Condition(&is_idle_), deadline);
}

MemoryPlan Batcher::Impl::memory() const {
  absl::MutexLock lock(&mutex_);
  return {MemoryUse{
      .place = "host", .kind = "staging", .bytes = live_ == nullptr ? 0 : live_->staging_bytes()}};
}

}  // namespace logprobd
