#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "server/weights/head_weights.h"

namespace logprobd {

struct ContentCheck {
  std::string sha256;  ///< Lower-case hex, of the rows and then the bias as they lie in the files.
  /// What of the weight or bias is NaN or Inf, "row 17 column 3 is NaN"; empty: nothing. Padding is
  /// not looked at: it takes no part.
  std::string nonfinite;
};

/// Reads the whole weight once. `progress` (may be empty) is told the bytes done and in all after
/// each few MiB; false from it ends the check with CANCELLED. Other errors are those of ReadRows,
/// and INTERNAL where the library for digests fails.
absl::StatusOr<ContentCheck> CheckContent(
    const HeadWeights& weights,
    const std::function<bool(int64_t done_bytes, int64_t total_bytes)>& progress);

}  // namespace logprobd
