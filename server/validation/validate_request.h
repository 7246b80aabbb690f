#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Checks a parsed request against the head it is for: every later stage may rely on it. The first
/// broken rule is returned as INVALID_ARGUMENT (FAILED_PRECONDITION for a weights version that is
/// not live), naming field, value and limit, and for lists the first offending index.
absl::Status ValidateRequest(const ScoreRequest& request, const HeadInfo& head);

}  // namespace logprobd

namespace logprobd::internal {

/// Every check here returns INVALID_ARGUMENT naming `field`, the first offending index, its value
/// and the limit. They scan whole arrays without branches first, since 65,536 rows are common.

/// Ids in [0, vocab), or `ignore_index` (pass a value in [0, vocab) where none is allowed).
absl::Status CheckTargets(absl::Span<const int32_t> targets, int64_t vocab, int32_t ignore_index);

/// Ids in [0, vocab).
absl::Status CheckIds(absl::string_view field, absl::Span<const int32_t> ids, int64_t vocab);

/// Offsets that start at 0, never fall and end at `total`, which `total_name` explains.
absl::Status CheckOffsets(absl::string_view field, absl::Span<const uint32_t> offsets,
                          int64_t total, absl::string_view total_name);

/// 1e-4 <= value <= 1e4; NaN is outside.
absl::Status CheckTemperature(absl::string_view field, float value);
absl::Status CheckTemperatures(absl::string_view field, absl::Span<const float> values);

}  // namespace logprobd::internal
