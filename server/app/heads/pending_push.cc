#include "server/app/heads/pending_push.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

bool IsSame(const WeightsPush& a, const WeightsPush& b) {
  return a.version == b.version && a.dtype == b.dtype && a.vocab_rows == b.vocab_rows &&
         a.sha256 == b.sha256 && a.allow_nonfinite == b.allow_nonfinite;
}

absl::Status Discarded() { return absl::AbortedError("the rows pushed so far were discarded"); }

}  // namespace

absl::StatusOr<std::shared_ptr<PendingPush::Version>> PendingPush::Join(const WeightsPush& push) {
  if (version_ != nullptr && version_->header.version == push.version) {
    if (!IsSame(version_->header, push)) {
      return absl::InvalidArgumentError(
          absl::StrCat("header: differs from that of the first push of version ", push.version));
    }
    if (version_->is_busy) return nullptr;
    ++version_->num_calls;
    return version_;
  }
  if (version_ != nullptr && (version_->num_calls > 0 || version_->is_busy)) {
    return absl::AbortedError(absl::StrCat("rows of version ", version_->header.version,
                                           " are being received: try again later"));
  }
  auto next = std::make_shared<Version>();
  next->header = push;
  next->num_calls = 1;
  next->is_busy = true;
  next->replaced = std::exchange(version_, next);
  return next;
}

absl::Status PendingPush::EndOpen(const std::shared_ptr<Version>& version,
                                  absl::StatusOr<std::shared_ptr<PushedWeights>> rows) {
  if (version != version_) return Discarded();
  version->is_busy = false;
  if (!rows.ok()) {
    version_ = nullptr;
    return rows.status();
  }
  version->rows = *std::move(rows);
  return absl::OkStatus();
}

absl::StatusOr<bool> PendingPush::Leave(const std::shared_ptr<Version>& version, bool has_all,
                                        absl::Time now) {
  --version->num_calls;
  version->left_at = now;
  if (!has_all) return false;
  if (version != version_) return version->is_staged ? absl::StatusOr<bool>(false) : Discarded();
  if (version->is_busy || !version->rows->is_complete()) return false;
  version->is_busy = true;
  return true;
}

absl::Status PendingPush::CheckNotDropped(const std::shared_ptr<Version>& version) const {
  return version == version_ ? absl::OkStatus() : Discarded();
}

void PendingPush::EndStaging(const std::shared_ptr<Version>& version, const absl::Status& staged,
                             absl::Time now) {
  version->is_busy = false;
  version->is_staged = staged.ok();
  version->left_at = now;
  // These errors return whenever the same rows are staged under the same number.
  const bool is_final =
      absl::IsDataLoss(staged) || absl::IsInvalidArgument(staged) || absl::IsAlreadyExists(staged);
  if (version == version_ && (staged.ok() || is_final)) version_ = nullptr;
}

std::shared_ptr<const PendingPush::Version> PendingPush::Drop() {
  return std::exchange(version_, nullptr);
}

std::shared_ptr<const PendingPush::Version> PendingPush::DropUnusedSince(absl::Time since) {
  const bool is_unused = version_ != nullptr && version_->num_calls == 0 && !version_->is_busy &&
                         version_->left_at <= since;
  return is_unused ? Drop() : nullptr;
}

int64_t PendingPush::memory_bytes() const {
  return version_ == nullptr || version_->rows == nullptr ? 0 : version_->rows->memory_bytes();
}

std::optional<PushedVersion> PendingPush::state() const {
  return version_ == nullptr || version_->rows == nullptr
             ? std::nullopt
             : std::optional<PushedVersion>(version_->rows->progress());
}

}  // namespace logprobd
