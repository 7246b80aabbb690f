#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// Digest and non-finite values of a head's weight and bias.
struct ContentCheck {
  std::string sha256;  ///< Lower-case hex digest of the stored rows followed by the stored bias.
  /// Names the first NaN or Inf of the weight or the bias: "row 17 column 3 is NaN or Inf". Empty
  /// if all values are finite. Padding rows are not checked, since they are never used.
  std::string nonfinite;
};

/// Reads the whole weight once and checks it. `progress`, which may be empty, is called about every
/// MiB with the number of bytes done and the total number of bytes. If it returns false, the check
/// returns CANCELLED. Also returns the errors of ReadRows, and INTERNAL if libcrypto fails.
absl::StatusOr<ContentCheck> CheckContent(
    const HeadWeights& weights,
    const std::function<bool(int64_t done_bytes, int64_t total_bytes)>& progress);

}  // namespace logprobd
