#pragma once

#include "absl/status/status.h"
#include "server/base/head_info.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Checks a parsed request against the head it is for: every later stage may rely on it. The first
/// broken rule is returned as INVALID_ARGUMENT (FAILED_PRECONDITION for a weights version that is
/// not live), naming field, value and limit, and for lists the first offending index.
absl::Status ValidateRequest(const ScoreRequest& request, const HeadInfo& head);

}  // namespace logprobd
