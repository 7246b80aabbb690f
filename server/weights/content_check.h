#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
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

/// Returns the INVALID_ARGUMENT that refuses a head because of ContentCheck::nonfinite. `source` is
/// where the head is from, and `advice` says what to change.
absl::Status NotFinite(absl::string_view source, absl::string_view nonfinite,
                       absl::string_view advice);

/// A weight whose reads return NotFinite if a valid row, or its bias, has a NaN or Inf. It checks a
/// weight that is read anyway without another pass. `weights` must outlive it.
class FiniteWeights final : public HeadWeights {
 public:
  FiniteWeights(const HeadWeights& weights, std::string source, std::string advice)
      : weights_(weights), source_(std::move(source)), advice_(std::move(advice)) {}

  const HeadInfo& info() const override { return weights_.info(); }
  const std::vector<float>& bias() const override { return weights_.bias(); }
  absl::Span<const std::byte> stored_bias() const override { return weights_.stored_bias(); }
  int64_t memory_bytes() const override { return weights_.memory_bytes(); }

  /// Names the first value that is not finite in these rows.
  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override;

 private:
  const HeadWeights& weights_;
  const std::string source_;
  const std::string advice_;
};

}  // namespace logprobd
