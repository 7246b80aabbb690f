// The Batcher's interface and the functions that run on callers' threads: create, submit, cancel,
// change limits, commit another version of the weights, drain, stop.

#include "server/batching/batcher.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/score_request.h"
#include "server/batching/batcher_impl.h"
#include "server/batching/version_replicas.h"
#include "server/batching/version_switch.h"

namespace logprobd {
namespace {

absl::Status CheckRange(absl::string_view option, int64_t value, int64_t min, int64_t max) {
  if (value < min || value > max) {
    return absl::InvalidArgumentError(
        absl::StrCat(option, ": ", value, " is not in [", min, ", ", max, "]"));
  }
  return absl::OkStatus();
}

absl::Status CheckLimits(const Batcher::Options& options) {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  LOGPROBD_RETURN_IF_ERROR(CheckRange("queue_rows_max", options.queue_rows_max, 1, kAny));
  LOGPROBD_RETURN_IF_ERROR(CheckRange("queue_bytes_max", options.queue_bytes_max, 1, kAny));
  LOGPROBD_RETURN_IF_ERROR(CheckRange("queue_requests_max", options.queue_requests_max, 1, kAny));
  if (options.batch_wait_max < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "batch_wait_max: ", absl::FormatDuration(options.batch_wait_max), " is below 0"));
  }
  if (!(options.client_share_max > 0 && options.client_share_max <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("client_share_max: ", options.client_share_max, " is not in (0, 1]"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const Batcher::Options& options) {
  LOGPROBD_RETURN_IF_ERROR(CheckRange("copy_threads", options.copy_threads, 0, 256));
  LOGPROBD_RETURN_IF_ERROR(CheckRange("answer_threads", options.answer_threads, 0, 256));
  return CheckLimits(options);
}

Admission::Limits AdmissionLimits(const Batcher::Options& options) {
  return {.total = {.rows = options.queue_rows_max,
                    .bytes = options.queue_bytes_max,
                    .requests = options.queue_requests_max},
          .client_share = options.client_share_max};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Batcher>> Batcher::Create(const Options& options,
                                                         VersionReplicas& first, const Clock& clock,
                                                         Metrics& metrics) {
  LOGPROBD_RETURN_IF_ERROR(CheckOptions(options));
  auto impl = std::make_unique<Impl>(options, first, clock, metrics);
  LOGPROBD_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<Batcher>(new Batcher(std::move(impl)));
}

Batcher::Batcher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Batcher::~Batcher() { Stop(); }

void Batcher::Stop() { impl_->Stop(); }

absl::StatusOr<RequestTicket> Batcher::Submit(ScoreRequest request, ScoreCallback done) {
  return impl_->Submit(std::move(request), std::move(done));
}

void Batcher::Cancel(RequestTicket ticket) { impl_->Cancel(ticket); }

absl::Status Batcher::SetLimits(const Options& options) {
  LOGPROBD_RETURN_IF_ERROR(CheckLimits(options));
  impl_->SetLimits(options);
  return absl::OkStatus();
}

void Batcher::Commit(VersionReplicas* next) { impl_->Commit(next); }

bool Batcher::AwaitRetired(absl::Time until) { return impl_->AwaitRetired(until); }

void Batcher::Fail(const absl::Status& why) { impl_->Fail(why); }

void Batcher::Abandon(const absl::Status& why) { impl_->Abandon(why); }

bool Batcher::Drain(absl::Time deadline) { return impl_->Drain(deadline); }

MemoryPlan Batcher::memory() const { return impl_->memory(); }

int64_t Batcher::StagingBytes(int64_t batch_rows_max, const HeadInfo& head) {
  // The buffer is sized for rows of the head's own dtype. A batch of wider rows holds fewer of
  // them; at least one row of any dtype fits.
  return std::max(batch_rows_max * head.hidden_size * DtypeBytes(head.dtype),
                  head.hidden_size * DtypeBytes(Dtype::kF32));
}

QueueLoad Batcher::ClientLimits(const Options& options) {
  return Admission::ClientLimits(AdmissionLimits(options));
}

Batcher::Impl::Impl(const Options& options, VersionReplicas& first, const Clock& clock,
                    Metrics& metrics)
    : options_(options),
      clock_(clock),
      metrics_(metrics),
      hidden_size_(first.hidden_size),
      reads_in_place_(first.reads_in_place),
      heartbeat_(AddHeartbeat(options.heartbeats, {.thread = "batch", .head = options.head})),
      copy_pool_("copy", options.copy_threads),
      gather_(copy_pool_),
      answer_pool_("answer", options.answer_threads),
      turns_(options.turns, options.turns_head),
      versions_(first),
      rate_kind_(first.kind),
      admission_(AdmissionLimits(options)),
      rate_(std::max<int64_t>(options.batch_rows_max / 4, 1)),
      wait_max_(options.batch_wait_max) {}

absl::Status Batcher::Impl::Start() {
  turns_.SetWake([this] {
    const absl::MutexLock lock(&mutex_);
    WakeLocked();
  });
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
    const absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
    WakeLocked();
  }
  if (thread_.joinable()) thread_.join();
  turns_.SetWake(nullptr);
}

absl::StatusOr<RequestTicket> Batcher::Impl::Submit(ScoreRequest request, ScoreCallback done) {
  auto pending = std::make_shared<PendingRequest>();
  pending->request = std::move(request);
  pending->done = std::move(done);
  pending->CountRows();
  pending->payload_bytes = PayloadBytes(pending->request);
  pending->held_bytes = FieldBytes(pending->request) + AnswerBytes(pending->request);

  absl::Status status;
  {
    const absl::MutexLock lock(&mutex_);
    status = CheckServingLocked(pending->request);
    if (status.ok()) status = AdmitLocked(pending);
    if (status.ok()) return pending->ticket;
  }
  if (absl::IsDeadlineExceeded(status)) metrics_.RecordDeadlineExceeded(Metrics::LeftAt::kArrival);
  return status;
}

absl::Status Batcher::Impl::EngineFailed() {
  return absl::UnavailableError("the engine has failed: retry on another server");
}

absl::Status Batcher::Impl::CheckServingLocked(const ScoreRequest& request) const {
  const VersionReplicas* const live = versions_.live();
  if (live != nullptr) {
    if (live->NumHealthy() == 0) return EngineFailed();
  } else if (!failure_.ok()) {
    return failure_;
  }
  // A request that waits for the next version is scored on the same devices.
  if (request.hidden.place == PayloadPlace::kDevice && !reads_in_place_) {
    return absl::FailedPreconditionError(
        "cuda_ipc: this head is not scored on a GPU; send the rows as hidden or in shared memory");
  }
  if (is_draining_ || is_stopping_) {
    return WithRejection(
        absl::UnavailableError("the server is shutting down: retry on another server"),
        Rejection::kDraining);
  }
  // The version is checked under the same lock under which the live version changes, so that a
  // request that was validated against one version is never scored with the next.
  if (request.weights_version == 0 ||
      (live != nullptr && request.weights_version == live->weights_version)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("weights_version: ", request.weights_version, ", but ",
                   live == nullptr ? "the weights are being replaced"
                                   : absl::StrCat("version ", live->weights_version, " is live"),
                   " for head \"", options_.head, "\""));
}

absl::Status Batcher::Impl::AdmitLocked(const Pending& pending) {
  const ScoreRequest& request = pending->request;
  const absl::Time now = clock_.Now();
  VersionReplicas* const live = versions_.live();
  if (live != nullptr) rate_.set_num_replicas(live->NumHealthy());
  LOGPROBD_RETURN_IF_ERROR(CheckDeadlineLocked(*pending, now));
  const QueueLoad load{.rows = pending->rows_to_score,
                       .bytes = pending->payload_bytes + pending->held_bytes,
                       .requests = 1};
  LOGPROBD_RETURN_IF_ERROR(admission_.CheckPossible(load, request.client_share));
  LOGPROBD_RETURN_IF_ERROR(
      admission_.Admit(request.client_id, request.priority(), load, rate_, request.client_share));
  pending->is_charged = true;

  pending->ticket = ++last_ticket_;
  pending->submitted = pending->times.submitted = now;
  requests_.emplace(pending->ticket, pending);
  is_idle_ = false;
  if (pending->rows_to_score == 0) {
    pending->result.weights_version = versions_.live_number();
    EndLocked(pending, absl::OkStatus(), endings_);
    WakeLocked();
    return absl::OkStatus();
  }
  if (request.deadline != absl::InfiniteFuture()) {
    deadlines_.emplace(request.deadline, pending->ticket);
  }
  if (pending->is_small() && live != nullptr) live->launch_rule.NoteSmallRequest(now);
  // Wakes the batch thread only if this request changes what it waits for.
  const bool was_empty = versions_.queue().empty();
  versions_.queue().Push(pending);
  const bool may_launch = !turns_.is_waiting() && versions_.LaunchTime(now) <= now;
  if (was_empty || may_launch || request.deadline < wake_time_) WakeLocked();
  return absl::OkStatus();
}

absl::Status Batcher::Impl::CheckDeadlineLocked(const PendingRequest& pending,
                                                absl::Time now) const {
  const ScoreRequest& request = pending.request;
  if (request.deadline <= now) {
    return absl::DeadlineExceededError("the deadline had already passed on arrival");
  }
  if (request.deadline == absl::InfiniteFuture()) return absl::OkStatus();
  if (const Slot* slot = versions_.FindFreeSlot();
      versions_.queue().empty() && slot != nullptr && slot->replica.in_flight == 0) {
    // Scoring the request delays no other request and shows how fast the engine is now.
    return absl::OkStatus();
  }
  // This is a lower bound of the wait: this client's earlier rows must leave the queue first, at
  // the best measured rate.
  const int64_t rows = pending.rows_to_score + versions_.queue().RowsBefore(pending);
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
    const absl::MutexLock lock(&mutex_);
    const auto found = requests_.find(ticket);
    if (found == requests_.end()) return;
    const Pending pending = found->second;
    WakeLocked();
    if (!pending->is_queued) left_at = Metrics::LeftAt::kEngine;
    absl::Status status =
        LateIfDue(absl::CancelledError("the client cancelled the request"),
                  pending->request.deadline, clock_.Now(), DeadlinePassed(*pending).message());
    const bool is_late = absl::IsDeadlineExceeded(status);
    EndLocked(pending, std::move(status), endings_);
    if (is_late) {
      return;  // Answer() records it as a passed deadline.
    }
  }
  metrics_.RecordCancelled(left_at);
}

void Batcher::Impl::SetLimits(const Options& options) {
  const absl::MutexLock lock(&mutex_);
  admission_.SetLimits(AdmissionLimits(options));
  wait_max_ = options.batch_wait_max;
  if (versions_.live() != nullptr) versions_.live()->launch_rule.set_wait_max(wait_max_);
  WakeLocked();  // A waiting batch may be due with the new limits.
}

bool Batcher::Impl::Drain(absl::Time deadline) {
  const absl::MutexLock lock(&mutex_);
  is_draining_ = true;
  return clock_.AwaitUntil(mutex_, absl::Condition(&is_idle_), deadline);
}

MemoryPlan Batcher::Impl::memory() const {
  const absl::MutexLock lock(&mutex_);
  const VersionReplicas* const live = versions_.live();
  return {MemoryUse{
      .place = "host", .kind = "staging", .bytes = live == nullptr ? 0 : live->staging_bytes()}};
}

void Batcher::Impl::Commit(VersionReplicas* next) {
  const absl::MutexLock lock(&mutex_);
  LOGPROBD_CHECK(next == nullptr ||
                 (next->hidden_size == hidden_size_ && next->reads_in_place == reads_in_place_));
  versions_.Commit(next);
  failure_ = absl::OkStatus();
  if (next != nullptr) {
    next->launch_rule.set_wait_max(wait_max_);
    if (rate_kind_ != next->kind) {  // The measured rate does not apply to other engines.
      rate_kind_ = next->kind;
      rate_ = DrainRate(std::max<int64_t>(options_.batch_rows_max / 4, 1));
    }
  }
  WakeLocked();
}

bool Batcher::Impl::AwaitRetired(absl::Time until) {
  const absl::MutexLock lock(&mutex_);
  if (!clock_.AwaitUntil(mutex_, absl::Condition(&versions_, &VersionSwitch::IsRetired), until)) {
    return false;
  }
  versions_.ForgetRetired();
  WakeLocked();  // The live version may have waited for the retired one's devices.
  return true;
}

void Batcher::Impl::Fail(const absl::Status& why) {
  const absl::MutexLock lock(&mutex_);
  LOGPROBD_CHECK(versions_.live() == nullptr && !why.ok(), why.message());
  failure_ = why;
  EndQueuedLocked(versions_.queue(), why);
  WakeLocked();
}

void Batcher::Impl::Abandon(const absl::Status& why) {
  std::vector<Ending> endings;
  {
    const absl::MutexLock lock(&mutex_);
    is_draining_ = true;
    endings = std::exchange(endings_, {});  // Requests that the batch thread has not answered yet.
    while (!requests_.empty()) {
      const Pending pending = requests_.begin()->second;
      EndLocked(pending, why, endings);
    }
    ++answering_;
  }
  AnswerAll(std::move(endings));
  const absl::MutexLock lock(&mutex_);
  --answering_;
  UpdateIdleLocked();
}

}  // namespace logprobd
