#include "server/batching/batcher.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/batching/batcher_impl.h"
#include "server/batching/version_replicas.h"

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

}  // namespace

absl::StatusOr<std::unique_ptr<Batcher>> Batcher::Create(const Options& options,
                                                         absl::Span<ScoringEngine* const> replicas,
                                                         const Clock& clock, Metrics& metrics) {
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<VersionReplicas> first,
                            VersionReplicas::Create(options, replicas));
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<Batcher> batcher,
                            Create(options, *first, clock, metrics));
  batcher->first_ = std::move(first);
  return batcher;
}

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

void Batcher::AwaitRetired() { impl_->AwaitRetired(); }

void Batcher::Fail(const absl::Status& why) { impl_->Fail(why); }

bool Batcher::Drain(absl::Time deadline) { return impl_->Drain(deadline); }

MemoryPlan Batcher::memory() const { return impl_->memory(); }

int64_t Batcher::StagingBytes(int64_t batch_rows_max, const HeadInfo& head) {
  // Sized for the head's own dtype; wider rows come fewer to a batch. One row of any dtype fits.
  return std::max(batch_rows_max * head.hidden_size * DtypeBytes(head.dtype),
                  head.hidden_size * DtypeBytes(Dtype::kF32));
}

QueueLoad Batcher::ClientLimits(const Options& options) {
  return Admission::ClientLimits(AdmissionLimits(options));
}

}  // namespace logprobd
