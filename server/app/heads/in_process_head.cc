#include "server/app/heads/in_process_head.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "server/app/heads/verify_probe.h"
#include "server/base/errors.h"
#include "server/base/host.h"

namespace logprobd {
namespace {

/// Interval at which a Verify that waits for the engine checks whether it must stop.
constexpr absl::Duration kStopPeriod = absl::Milliseconds(20);

ScoreRequest RequestOf(const std::shared_ptr<VerifyProbe>& probe, const HeadInfo& head,
                       absl::Time now) {
  ScoreRequest request;
  request.request_id = "verify";
  request.client_id = "(verify)";  // no caller can have this id
  request.head = head.name;
  request.weights_version = head.weights_version;  // the truth is computed from the same weights
  request.dtype_number = static_cast<int32_t>(probe->dtype);
  request.rows = probe->rows;
  request.hidden_size = head.hidden_size;
  request.targets = probe->targets;
  request.output_bits = kDefaultOutputs.bits();
  request.hidden.pieces = {absl::MakeConstSpan(probe->hidden)};
  request.hidden.bytes = static_cast<int64_t>(probe->hidden.size());
  request.hidden.owner = probe;
  request.received = now;
  return request;
}

}  // namespace

absl::StatusOr<std::shared_ptr<InProcessHead>> InProcessHead::Create(
    HeadInfo info, std::unique_ptr<const HeadWeights> weights,
    std::vector<std::unique_ptr<ScoringEngine>> replicas, const Batcher::Options& options,
    const Clock& clock, Metrics& metrics) {
  LOGPROBD_ASSIGN_OR_RETURN(
      std::unique_ptr<VersionEngines> live,
      VersionEngines::Create(std::move(info), std::move(weights), std::move(replicas), options));
  VersionReplicas& first = *live->replicas;
  std::shared_ptr<InProcessHead> head(new InProcessHead(std::move(live), clock));
  LOGPROBD_ASSIGN_OR_RETURN(head->batcher_, Batcher::Create(options, first, clock, metrics));
  return head;
}

InProcessHead::InProcessHead(std::unique_ptr<VersionEngines> live, const Clock& clock)
    : clock_(clock),
      live_(std::move(live)),
      info_(live_->info),
      limits_(info_->limits),
      num_replicas_(static_cast<int>(live_->engines.size())) {}

InProcessHead::~InProcessHead() {
  is_draining_ = true;
  StopVerify();
  if (batcher_ != nullptr) {
    // A Verify that waits for its scores gets UNAVAILABLE; it may still call Submit.
    batcher_->Stop();
  }
  std::thread verify;
  {
    const absl::MutexLock lock(&verify_mutex_);
    verify = std::move(verify_thread_);
  }
  if (verify.joinable()) verify.join();
  batcher_.reset();
}

void InProcessHead::StopVerify() {
  const absl::MutexLock lock(&verify_mutex_);
  if (verify_stop_ != nullptr) verify_stop_->store(true);
}

std::shared_ptr<const HeadInfo> InProcessHead::info() const {
  const absl::ReaderMutexLock lock(&version_mutex_);
  return info_;
}

bool InProcessHead::ready() const { return !is_draining_ && healthy() && failure().empty(); }

int InProcessHead::num_replicas() const {
  const absl::ReaderMutexLock lock(&version_mutex_);
  return num_replicas_;
}

int InProcessHead::num_healthy() const {
  const absl::ReaderMutexLock lock(&version_mutex_);
  return live_ == nullptr ? num_replicas_ : live_->replicas->NumHealthy();
}

bool InProcessHead::is_replica_healthy(int replica) const {
  const absl::ReaderMutexLock lock(&version_mutex_);
  return live_ == nullptr || live_->engines[static_cast<size_t>(replica)]->healthy();
}

void InProcessHead::BeginCommit(std::unique_ptr<VersionEngines> next) {
  const absl::MutexLock lock(&version_mutex_);
  batcher_->Commit(next == nullptr ? nullptr : next->replicas.get());
  retiring_ = std::exchange(live_, std::move(next));
  failure_.clear();
  if (live_ != nullptr) {
    PublishLocked(*live_->info);
    num_replicas_ = static_cast<int>(live_->engines.size());
  }
}

bool InProcessHead::AwaitRetired() { return batcher_->AwaitRetired(clock_.Now() + kRetireTimeMax); }

std::unique_ptr<VersionEngines> InProcessHead::EndCommit() {
  batcher_->AwaitRetired();
  return std::move(retiring_);
}

std::unique_ptr<VersionEngines> InProcessHead::Commit(std::unique_ptr<VersionEngines> next) {
  BeginCommit(std::move(next));
  return EndCommit();
}

void InProcessHead::PublishLocked(const HeadInfo& info) {
  auto published = std::make_shared<HeadInfo>(info);
  published->limits = limits_;
  info_ = std::move(published);
}

void InProcessHead::Fail(const std::string& reason) {
  {
    const absl::MutexLock lock(&version_mutex_);
    failure_ = reason;
  }
  batcher_->Fail(absl::UnavailableError(reason));
}

std::string InProcessHead::failure() const {
  const absl::ReaderMutexLock lock(&version_mutex_);
  return failure_;
}

absl::StatusOr<RequestTicket> InProcessHead::Submit(ScoreRequest request, ScoreCallback done) {
  return batcher_->Submit(std::move(request), std::move(done));
}

absl::Status InProcessHead::SetLimits(const Batcher::Options& options,
                                      const RequestLimits& limits) {
  LOGPROBD_RETURN_IF_ERROR(batcher_->SetLimits(options));
  const absl::MutexLock lock(&version_mutex_);
  limits_ = limits;
  PublishLocked(*info_);
  return absl::OkStatus();
}

bool InProcessHead::Drain(absl::Time deadline) {
  is_draining_ = true;
  const bool is_finished = batcher_->Drain(deadline);
  StopVerify();
  return is_finished;
}

std::shared_ptr<const HeadWeights> InProcessHead::weights() const {
  const absl::ReaderMutexLock lock(&version_mutex_);
  return live_ == nullptr ? nullptr : live_->weights;
}

MemoryPlan InProcessHead::memory() const {
  const absl::ReaderMutexLock lock(&version_mutex_);
  return live_ == nullptr ? MemoryPlan() : live_->memory();
}

void InProcessHead::Verify(const VerifyOptions& options, VerifyCallback done) {
  if (options.rows < 1 || options.rows > 64) {
    std::move(done)(
        absl::InvalidArgumentError(absl::StrCat("rows: ", options.rows, ", must be in [1, 64]")));
    return;
  }
  std::thread previous;
  // The callback is shared, because a thread that fails to start destroys its function.
  const auto answer = [callback = std::make_shared<VerifyCallback>(std::move(done))](
                          absl::StatusOr<VerifyReport> report) {
    VerifyCallback& once = *callback;
    std::move(once)(std::move(report));
  };
  absl::Status refusal;
  {
    const absl::MutexLock lock(&verify_mutex_);
    if (is_draining_) {
      refusal = absl::UnavailableError("the server is shutting down");
    } else if (is_verifying_) {
      refusal = WithRetryAfter(
          absl::ResourceExhaustedError("another Verify is running: only one runs at a time"),
          absl::Seconds(5));
    } else {
      is_verifying_ = true;
      verify_stop_ =
          options.stop != nullptr ? options.stop : std::make_shared<std::atomic<bool>>(false);
      VerifyOptions own = options;
      own.stop = verify_stop_;
      previous = std::move(verify_thread_);
      absl::StatusOr<std::thread> started = StartThread("verify", [this, own, answer] {
        absl::StatusOr<VerifyReport> report = RunVerify(own);
        {
          const absl::MutexLock inner(&verify_mutex_);
          is_verifying_ = false;
        }
        answer(std::move(report));
      });
      is_verifying_ = started.ok();
      if (started.ok()) {
        verify_thread_ = *std::move(started);
      } else {
        refusal = started.status();
      }
    }
  }
  if (previous.joinable()) {
    previous.join();  // the thread has cleared is_verifying_ and is about to return
  }
  if (!refusal.ok()) answer(refusal);
}

absl::StatusOr<VerifyReport> InProcessHead::RunVerify(const VerifyOptions& options) {
  const absl::Time start = clock_.Now();
  std::shared_ptr<const HeadWeights> weights;
  std::shared_ptr<const HeadInfo> info;
  {
    const absl::ReaderMutexLock lock(&version_mutex_);
    if (live_ == nullptr) return absl::UnavailableError("the weights are being replaced");
    weights = live_->weights;
    info = live_->info;
  }
  absl::StatusOr<VerifyProbe> made = MakeVerifyProbe(*weights, options);
  if (absl::IsCancelled(made.status())) return made.status();
  LOGPROBD_RETURN_IF_ERROR(WithDetailsForLog(made.status()));
  const auto probe = std::make_shared<VerifyProbe>(*std::move(made));
  absl::Notification answered;
  absl::StatusOr<ScoreResult> scores;
  ScoreRequest request = RequestOf(probe, *info, start);
  request.deadline = options.deadline;
  const absl::StatusOr<RequestTicket> ticket = batcher_->Submit(
      std::move(request), [&answered, &scores](absl::StatusOr<ScoreResult> result) {
        scores = std::move(result);
        answered.Notify();
      });
  if (absl::IsFailedPrecondition(ticket.status())) {
    return absl::AbortedError("the weights were replaced during the Verify: verify again");
  }
  LOGPROBD_RETURN_IF_ERROR(ticket.status());
  // The engine scores the probe while this thread computes the truth.
  const absl::StatusOr<VerifyTruth> truth = ScoreVerifyProbe(*weights, *probe, *options.stop);
  while (!answered.WaitForNotificationWithTimeout(kStopPeriod)) {
    if (options.stop->load()) {
      batcher_->Cancel(*ticket);  // the engine may be stuck
      answered.WaitForNotification();
    }
  }
  if (!truth.ok()) {
    const bool is_for_client =
        absl::IsCancelled(truth.status()) || absl::IsFailedPrecondition(truth.status());
    return is_for_client ? truth.status() : WithDetailsForLog(truth.status());
  }
  LOGPROBD_RETURN_IF_ERROR(WithContext(scores.status(), "scoring the probe"));
  VerifyReport report = CompareWithTruth(*truth, scores->logprob, scores->entropy);
  report.weights_version = info->weights_version;
  report.seconds = absl::ToDoubleSeconds(clock_.Now() - start);
  return report;
}

}  // namespace logprobd
