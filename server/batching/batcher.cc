#include "server/batching/batcher.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/batching/batcher_impl.h"

namespace logprobd {
namespace {

absl::Status CheckRange(absl::string_view option, int64_t value, int64_t min, int64_t max) {
  if (value < min || value > max) {
    return absl::InvalidArgumentError(
        absl::StrCat(option, ": ", value, " is not in [", min, ", ", max, "]"));
  }
  return absl::OkStatus();
}

/// What a row's scores and the sizes of batches follow from.
auto HeadFacts(const ScoringEngine& engine) {
  const HeadInfo& info = engine.info();
  return std::tuple(info.name, info.weights_version, info.hidden_size, info.vocab_size,
                    info.vocab_rows, info.dtype, info.has_bias, info.scale, info.softcap,
                    info.engine, engine.batch_rows_max());
}

absl::Status CheckReplicas(absl::Span<ScoringEngine* const> replicas) {
  if (replicas.empty()) {
    return absl::InvalidArgumentError("replicas: there must be at least one");
  }
  for (size_t i = 1; i < replicas.size(); ++i) {
    if (HeadFacts(*replicas[i]) != HeadFacts(*replicas.front())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "replicas: number ", i, " has another head or batch_rows_max than number 0"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const Batcher::Options& options, int64_t engine_rows_max) {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  LOGPROBD_RETURN_IF_ERROR(
      CheckRange("batch_rows_max", options.batch_rows_max, 1, engine_rows_max));
  LOGPROBD_RETURN_IF_ERROR(CheckRange("queue_rows_max", options.queue_rows_max, 1, kAny));
  LOGPROBD_RETURN_IF_ERROR(CheckRange("queue_bytes_max", options.queue_bytes_max, 1, kAny));
  LOGPROBD_RETURN_IF_ERROR(CheckRange("queue_requests_max", options.queue_requests_max, 1, kAny));
  LOGPROBD_RETURN_IF_ERROR(CheckRange("copy_threads", options.copy_threads, 0, 256));
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

}  // namespace

absl::StatusOr<std::unique_ptr<Batcher>> Batcher::Create(const Options& options,
                                                         absl::Span<ScoringEngine* const> replicas,
                                                         const Clock& clock, Metrics& metrics) {
  LOGPROBD_RETURN_IF_ERROR(CheckReplicas(replicas));
  LOGPROBD_RETURN_IF_ERROR(CheckOptions(options, replicas.front()->batch_rows_max()));
  const int64_t staging_bytes = StagingBytes(options.batch_rows_max, replicas.front()->info());
  auto impl = std::make_unique<Impl>(options, replicas.front()->info(), clock, metrics);
  for (ScoringEngine* engine : replicas) {
    std::vector<std::unique_ptr<StagingBuffer>> staging;
    for (int i = 0; i < ScoringEngine::kBatchesInFlight; ++i) {
      LOGPROBD_ASSIGN_OR_RETURN(staging.emplace_back(), engine->AllocateStaging(staging_bytes));
    }
    impl->AddReplica(*engine, std::move(staging));
  }
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
