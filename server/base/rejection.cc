#include "server/base/rejection.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace logprobd {
namespace {

constexpr absl::string_view kRejectionUrl = "logprobd.rejection";

}  // namespace

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
  if (absl::IsDeadlineExceeded(status)) {
    return Rejection::kDeadline;
  }
  return absl::IsUnavailable(status) ? Rejection::kNotReady : Rejection::kInvalid;
}

}  // namespace logprobd
