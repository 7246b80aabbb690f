#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd::client {

/// The sizes of a load's requests and how often each is drawn.
struct RowMix {
  struct Size {
    int64_t rows = 1;   ///< 1 to 2^24.
    double weight = 1;  ///< > 0, relative to the others'.
  };
  std::vector<Size> sizes;  ///< At least one; no size twice.

  /// The size of request `index`: an index into `sizes`, drawn by weight. The same for the same
  /// seed, whichever thread asks.
  size_t Draw(uint64_t seed, int64_t index) const;

  int64_t rows_max() const;
  /// "256", or "1:80,256:15".
  std::string Text() const;
};

/// Reads --rows: sizes, one load each ("1,256,8192"), or one mix of sizes with weights
/// ("1:80,256:15,8192:5"). INVALID_ARGUMENT says what is wrong.
absl::StatusOr<std::vector<RowMix>> ParseRows(absl::string_view text);

/// The values of "4", "1:8", "1:16:5" (start, end, step; the end is included when a step meets it).
/// INVALID_ARGUMENT unless all are 1 or more, start <= end and there are at most 1,000.
absl::StatusOr<std::vector<int64_t>> ParseRange(absl::string_view text);

}  // namespace logprobd::client
