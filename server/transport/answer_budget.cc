#include "server/transport/answer_budget.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

/// Estimated delay. It cannot be measured, because the clients decide when they read.
constexpr absl::Duration kRetryAfter = absl::Milliseconds(100);

absl::Status TooMuch(absl::string_view whose, int64_t held, int64_t more, int64_t limit) {
  return WithRejection(
      WithRetryAfter(absl::ResourceExhaustedError(
                         absl::StrCat(whose, " responses: ", held, " bytes are not sent yet, and ",
                                      more, " more would exceed the limit of ", limit,
                                      ": read responses before you send more requests")),
                     kRetryAfter),
      Rejection::kAnswerBytes);
}

int64_t Share(int64_t bytes, double share) {
  return std::max<int64_t>(static_cast<int64_t>(static_cast<double>(bytes) * share), 1);
}

}  // namespace

AnswerBudget::AnswerBudget(const Options& options) { SetLimits(options); }

void AnswerBudget::SetLimits(const Options& options) {
  const absl::MutexLock lock(&mutex_);
  bytes_max_ = options.bytes_max;
  client_bytes_max_ = Share(options.bytes_max, options.client_share_max);
}

absl::StatusOr<AnswerBudget::Hold> AnswerBudget::Take(const std::string& client_id, int64_t bytes,
                                                      double client_share) {
  const absl::MutexLock lock(&mutex_);
  const int64_t client_bytes_max =
      client_share == 0 ? client_bytes_max_ : Share(bytes_max_, client_share);
  if (bytes > client_bytes_max) {
    return WithRejection(
        absl::InvalidArgumentError(absl::StrCat(
            "request: its response of ", bytes, " bytes exceeds the limit of one client, ",
            client_bytes_max, " bytes: send fewer rows or candidates, or a smaller top_k")),
        Rejection::kInvalid);
  }
  Hold hold;
  if (bytes > 0) {
    if (held_ + bytes > bytes_max_) return TooMuch("all clients'", held_, bytes, bytes_max_);
    const auto found = by_client_.find(client_id);
    const int64_t client = found == by_client_.end() ? 0 : found->second;
    if (client + bytes > client_bytes_max) {
      return TooMuch("this client's", client, bytes, client_bytes_max);
    }
    held_ += bytes;
    by_client_[client_id] = client + bytes;
    hold.budget_ = this;
    hold.client_id_ = client_id;
    hold.bytes_ = bytes;
  }
  return hold;
}

int64_t AnswerBudget::held_bytes() const {
  const absl::MutexLock lock(&mutex_);
  return held_;
}

void AnswerBudget::Release(const std::string& client_id, int64_t bytes) {
  const absl::MutexLock lock(&mutex_);
  const auto found = by_client_.find(client_id);
  LOGPROBD_CHECK(found != by_client_.end() && found->second >= bytes);
  held_ -= bytes;
  found->second -= bytes;
  if (found->second == 0) by_client_.erase(found);
}

void AnswerBudget::Hold::Release() {
  if (budget_ != nullptr) std::exchange(budget_, nullptr)->Release(client_id_, bytes_);
}

}  // namespace logprobd
