#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Checks a parsed request against its head; every later stage relies on the result. Returns
/// INVALID_ARGUMENT for the first broken rule, or FAILED_PRECONDITION for a weights version that is
/// not live. The message names the field, its value and the limit, and for lists the first bad
/// index.
absl::Status ValidateRequest(const ScoreRequest& request, const HeadInfo& head);

}  // namespace logprobd

namespace logprobd::internal {

// Every check returns INVALID_ARGUMENT that names the field, the first bad index, its value and the
// limit. A check first scans the whole array without branches, because 65,536 rows are common.

/// Checks that each target is in [0, vocab) or is `ignore_index`. A caller without an ignore index
/// passes a value in [0, vocab).
absl::Status CheckTargets(absl::Span<const int32_t> targets, int64_t vocab, int32_t ignore_index);

/// Checks that each id is in [0, vocab).
absl::Status CheckIds(absl::string_view field, absl::Span<const int32_t> ids, int64_t vocab);

/// Checks that the offsets start at 0, never decrease and end at `total`, which the message calls
/// `total_name`.
absl::Status CheckOffsets(absl::string_view field, absl::Span<const uint32_t> offsets,
                          int64_t total, absl::string_view total_name);

/// Checks that 1e-4 <= value <= 1e4, which excludes NaN.
absl::Status CheckTemperature(absl::string_view field, float value);

/// Performs the check of CheckTemperature for the temperature of each row whose target is not
/// `ignore_index`. `values` and `targets` have the same size.
absl::Status CheckTemperatures(absl::string_view field, absl::Span<const float> values,
                               absl::Span<const int32_t> targets, int32_t ignore_index);

}  // namespace logprobd::internal
