#include "server/base/errors.h"

#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/log.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

constexpr absl::string_view kRetryAfterUrl = "logprobd.retry_after_ms";
constexpr absl::string_view kDetailsUrl = "logprobd.details_for_log";

constexpr absl::string_view kRejectionUrl = "logprobd.rejection";

}  // namespace

absl::Status WithRetryAfter(absl::Status status, absl::Duration retry_after) {
  const int64_t milliseconds =
      absl::ToInt64Milliseconds(absl::Ceil(retry_after, absl::Milliseconds(1)));
  status.SetPayload(kRetryAfterUrl, absl::Cord(absl::StrCat(milliseconds)));
  return status;
}

std::optional<absl::Duration> RetryAfter(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryAfterUrl);
  int64_t milliseconds = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &milliseconds)) {
    return std::nullopt;
  }
  return absl::Milliseconds(milliseconds);
}

absl::Status WithDetailsForLog(absl::Status status) {
  status.SetPayload(kDetailsUrl, absl::Cord());  // does nothing to an OK status
  return status;
}

bool HasDetailsForLog(const absl::Status& status) {
  return absl::IsInternal(status) || absl::IsDataLoss(status) ||
         status.GetPayload(kDetailsUrl).has_value();
}

absl::Status WithContext(const absl::Status& status, absl::string_view prefix) {
  if (status.ok()) return status;
  absl::Status result(status.code(), absl::StrCat(prefix, ": ", status.message()));
  status.ForEachPayload([&result](absl::string_view url, const absl::Cord& payload) {
    result.SetPayload(url, payload);
  });
  return result;
}

absl::Status WithRejection(absl::Status status, Rejection reason) {
  status.SetPayload(kRejectionUrl, absl::Cord(absl::StrCat(static_cast<int>(reason))));
  return status;
}

Rejection RejectionOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kRejectionUrl);
  int reason = 0;
  if (payload.has_value() && absl::SimpleAtoi(std::string(*payload), &reason)) {
    return static_cast<Rejection>(reason);
  }
  if (absl::IsDeadlineExceeded(status)) return Rejection::kDeadline;
  return absl::IsUnavailable(status) ? Rejection::kNotReady : Rejection::kInvalid;
}

namespace internal {

void CheckFailed(const char* file, int line, const char* expression, const std::string& values) {
  WriteToLog(absl::StrCat(file, ":", line, ": broken invariant: ", expression,
                          values.empty() ? "" : ": ", OneLine(values, kLogValueBytesMax), "\n"));
  std::abort();
}

}  // namespace internal
}  // namespace logprobd
