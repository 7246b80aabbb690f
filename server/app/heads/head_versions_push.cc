// The part of HeadVersions that receives pushed rows.

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/app/heads/head_versions.h"
#include "server/base/errors.h"
#include "server/base/log.h"

namespace logprobd {
namespace {

/// WeightsVersion::source of a pushed version.
constexpr char kSource[] = "pushed";

/// Passes all rows of a call to `take`, and returns its first error or that of `next`.
template <typename Take>
absl::Status ReceiveRows(const NextPushedRows& next, const Take& take) {
  while (true) {
    LOGPROBD_ASSIGN_OR_RETURN(const std::optional<PushedRows> rows, next());
    if (!rows.has_value()) return absl::OkStatus();
    LOGPROBD_RETURN_IF_ERROR(take(*rows));
  }
}

absl::Status OtherIsStaged(const WeightsVersion& staged, absl::string_view difference) {
  return absl::FailedPreconditionError(
      absl::StrCat("version ", staged.version, " is staged with other weights (sha256 ",
                   staged.sha256, "): ", difference, "; commit or discard it first"));
}

/// Answers a call that sends rows of the staged version again, for example because the answer of
/// its first attempt was lost.
absl::StatusOr<PushedWeightsResult> CompareWithStaged(const PushedWeights& rows,
                                                      const WeightsVersion& staged,
                                                      const HeadInfo& pushed,
                                                      const std::string& sha256,
                                                      const NextPushedRows& next) {
  if (pushed.vocab_rows != rows.info().vocab_rows) {
    return OtherIsStaged(staged, "vocab_rows differs");
  }
  if (!sha256.empty() && absl::AsciiStrToLower(sha256) != staged.sha256) {
    return OtherIsStaged(staged, "sha256 differs");
  }
  const absl::Status compared =
      ReceiveRows(next, [&](const PushedRows& sent) { return rows.Compare(sent); });
  if (absl::IsDataLoss(compared)) return OtherIsStaged(staged, compared.message());
  LOGPROBD_RETURN_IF_ERROR(compared);
  return PushedWeightsResult{.pushed = rows.progress(), .staged = staged};
}

}  // namespace

absl::StatusOr<PushedWeightsResult> HeadVersions::Push(const WeightsPush& push,
                                                       const NextPushedRows& next,
                                                       const LoadTicker::Progress& progress) {
  if (is_stopped_) return ShuttingDown();
  if (push.version == 0) return absl::InvalidArgumentError("version: 0, must be at least 1");
  LoadTicker ticker(progress, is_stopped_);
  LOGPROBD_ASSIGN_OR_RETURN(const HeadInfo info, loader_.PushedHead(push, *head_.info()));
  LOGPROBD_ASSIGN_OR_RETURN(const JoinedPush joined, JoinPush(push, info, ticker));
  if (joined.staged_rows != nullptr) {
    return CompareWithStaged(*joined.staged_rows, joined.staged, info, push.sha256, next);
  }
  PushedWeights& rows = *joined.pending->rows;
  const absl::Status received =
      ReceiveRows(next, [&](const PushedRows& sent) { return rows.Add(sent); });
  absl::StatusOr<bool> is_last;
  {
    const absl::MutexLock lock(&mutex_);
    is_last = push_.Leave(joined.pending, received.ok(), options_.clock->Now());
  }
  LOGPROBD_RETURN_IF_ERROR(received);
  LOGPROBD_RETURN_IF_ERROR(is_last.status());
  PushedWeightsResult result;
  result.pushed = rows.progress();
  if (*is_last) {
    LOGPROBD_ASSIGN_OR_RETURN(result.staged, StagePushed(joined.pending, progress));
  }
  return result;
}

absl::StatusOr<HeadVersions::JoinedPush> HeadVersions::JoinPush(const WeightsPush& push,
                                                                const HeadInfo& info,
                                                                LoadTicker& ticker) {
  const std::string sha256 = absl::AsciiStrToLower(push.sha256);
  JoinedPush joined;
  while (joined.pending == nullptr) {
    LOGPROBD_RETURN_IF_ERROR(ticker.Report("checking", 0, 0));
    const absl::MutexLock lock(&mutex_);
    if (staged_ != nullptr && staged_->version.version == push.version) {
      joined.staged = staged_->version;
      joined.staged_rows = std::dynamic_pointer_cast<const PushedWeights>(staged_->weights);
      if (joined.staged_rows != nullptr) return joined;
    }
    LOGPROBD_RETURN_IF_ERROR(NumberOf(push.version).status());
    LOGPROBD_RETURN_IF_ERROR(CheckIsFree(push.version));
    LOGPROBD_RETURN_IF_ERROR(numbers_.CheckNames(push.version, sha256));
    LOGPROBD_ASSIGN_OR_RETURN(joined.pending, push_.Join(push));
    if (joined.pending == nullptr) {
      const auto is_free = [this]()
                               ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !push_.is_busy(); };
      mutex_.AwaitWithTimeout(absl::Condition(&is_free), LoadTicker::kPeriod);
    }
  }
  if (joined.pending->rows == nullptr) {
    LOGPROBD_RETURN_IF_ERROR(OpenPush(joined.pending, info, ticker));
  }
  return joined;
}

absl::Status HeadVersions::OpenPush(const std::shared_ptr<PendingPush::Version>& version,
                                    const HeadInfo& info, LoadTicker& ticker) {
  RecordDropped(std::exchange(version->replaced, nullptr), "another version is pushed");
  const auto open = [&]() -> absl::StatusOr<std::shared_ptr<PushedWeights>> {
    LOGPROBD_ASSIGN_OR_RETURN(const LoadTurn::Holder turn, AwaitTurn(ticker));
    return loader_.OpenPush(info);
  };
  absl::StatusOr<std::shared_ptr<PushedWeights>> rows = open();
  absl::Status opened;
  {
    const absl::MutexLock lock(&mutex_);
    opened = push_.EndOpen(version, std::move(rows));
  }
  NotifyChange();
  return opened;
}

absl::StatusOr<WeightsVersion> HeadVersions::StagePushed(
    const std::shared_ptr<PendingPush::Version>& version, const LoadTicker::Progress& progress) {
  const WeightsPush& push = version->header;
  const auto open = [&](uint64_t number) -> absl::StatusOr<VersionLoader::Candidate> {
    {
      // A discard may have come between the last row and the change.
      const absl::MutexLock lock(&mutex_);
      LOGPROBD_RETURN_IF_ERROR(push_.CheckNotDropped(version));
    }
    return VersionLoader::Candidate{.weights = version->rows,
                                    .version = {.version = number,
                                                .sha256 = "",
                                                .source = kSource,
                                                .loaded_unix_seconds = 0,
                                                .weight_bytes = version->rows->info().weight_bytes,
                                                .dtype = version->rows->info().dtype}};
  };
  const auto stage = [&]() -> absl::StatusOr<WeightsVersion> {
    // A call that was cancelled with its last row does not keep others from changing the head.
    LOGPROBD_RETURN_IF_ERROR(LoadTicker(progress, is_stopped_).Report("checking", 0, 0));
    return LoadAs(
        {.version = push.version, .sha256 = push.sha256, .allow_nonfinite = push.allow_nonfinite},
        open, progress);
  };
  absl::StatusOr<WeightsVersion> staged = stage();
  {
    const absl::MutexLock lock(&mutex_);
    push_.EndStaging(version, staged.status(), options_.clock->Now());
  }
  NotifyChange();
  return staged;
}

void HeadVersions::DropIdlePush() {
  std::shared_ptr<const PendingPush::Version> dropped;
  {
    const absl::MutexLock lock(&mutex_);
    dropped = push_.DropUnusedSince(options_.clock->Now() - options_.push_idle_max);
  }
  if (dropped != nullptr) {
    RecordDropped(std::move(dropped), "no call added to them for --push-idle-s");
    NotifyChange();
  }
}

void HeadVersions::RecordDropped(std::shared_ptr<const PendingPush::Version> dropped,
                                 absl::string_view reason) {
  if (dropped == nullptr || dropped->rows == nullptr) return;
  const PushedVersion progress = dropped->rows->progress();
  dropped = nullptr;  // calls that are sending rows still hold the memory
  metrics_.RecordWeightsSwap(name(), Metrics::WeightsSwap::kDiscarded);
  LogWarning("pushed rows were dropped", {{"head", name()},
                                          {"version", progress.version},
                                          {"rows", progress.rows},
                                          {"reason", reason}});
}

}  // namespace logprobd
