#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Largest dimension or offset that the format's schema allows.
inline constexpr int64_t kSafetensorsSizeMax = (int64_t{1} << 48) - 1;

/// Bytes of a tensor. INVALID_ARGUMENT: an unknown dtype, more than 2^63 elements or bits, or, with
/// a dtype below 8 bits, a last byte that is not full.
absl::StatusOr<int64_t> TensorBytes(absl::string_view dtype, const std::vector<int64_t>& shape);

/// Checks that the tensors' [begin, end) follow each other from 0 to `data_bytes` without holes and
/// overlaps. Sorts `spans`.
absl::Status CheckSpans(std::vector<std::pair<int64_t, int64_t>>& spans, int64_t data_bytes);

}  // namespace logprobd
