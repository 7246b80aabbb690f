#pragma once

#include "absl/status/status.h"

namespace logprobd {

/// Why a request was refused before it was queued: the reasons of the metric rejected_total.
enum class Rejection {
  kQueueRows,
  kQueueBytes,
  kQueueRequests,
  kClientShare,
  kDeadline,
  kDraining,
  kNotReady,
  kInvalid,
  kAnswerBytes
};

/// `status` with the reason for those who count it; clients do not see it.
absl::Status WithRejection(absl::Status status, Rejection reason);

/// The reason that `status` carries, else what its code says.
Rejection RejectionOf(const absl::Status& status);

}  // namespace logprobd
