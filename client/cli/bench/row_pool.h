#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/score.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// Returns `value` as bf16 or f16, rounded to nearest even. f16 values out of range become
/// infinite.
uint16_t ToBf16(float value);
uint16_t ToF16(float value);

/// Allocates zeroed memory on the heap. Returns RESOURCE_EXHAUSTED if there is not enough.
absl::StatusOr<RowBuffer> AllocateHeapRows(int64_t bytes);

/// The rows that a load sends: hidden states with standard normal elements, and targets spread over
/// the vocabulary. The same seed gives the same bytes on every machine. Requests take the rows
/// cyclically, so a large request repeats rows: generating random numbers must not take longer than
/// sending them. Thread-safe once created.
class RowPool {
 public:
  /// Creates a pool for requests of up to `rows_max` rows. Returns the errors of AllocateHeapRows.
  static absl::StatusOr<RowPool> Create(const Head& head, Dtype dtype, int64_t rows_max,
                                        uint64_t seed);

  /// Number of different rows, >= 1.
  int64_t distinct_rows() const { return distinct_rows_; }
  int64_t hidden_size() const { return hidden_size_; }
  Dtype dtype() const { return dtype_; }
  int64_t row_bytes() const { return hidden_size_ * DtypeBytes(dtype_); }

  /// Returns at least `rows_max` rows in cyclic order. A load without fresh rows sends these.
  absl::Span<const std::byte> hidden() const { return hidden_.bytes(); }
  absl::Span<const int32_t> targets() const { return targets_; }

  /// Consecutive rows of the pool, [begin, begin + count).
  struct Run {
    int64_t begin;
    int64_t count;
  };
  /// Returns, in order, the runs that hold `rows` rows starting with distinct row `first`.
  std::vector<Run> Runs(int64_t first, int64_t rows) const;

  /// Writes `rows` rows, starting with distinct row `first`, and their targets.
  void Fill(int64_t first, int64_t rows, absl::Span<std::byte> hidden,
            absl::Span<int32_t> targets) const;
  /// Writes only the targets of these rows.
  void FillTargets(int64_t first, int64_t rows, absl::Span<int32_t> targets) const;

 private:
  RowPool() = default;

  int64_t distinct_rows_ = 1;
  int64_t hidden_size_ = 0;
  Dtype dtype_ = Dtype::kBf16;
  RowBuffer hidden_;              ///< [max(rows_max, distinct_rows), hidden_size]
  std::vector<int32_t> targets_;  ///< One target for each row of hidden_.
};

}  // namespace logprobd::client
