#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cli/bench/row_memory.h"
#include "client/cpp/score.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// The rows that a load sends: hidden states of standard normal elements with targets spread over
/// the vocabulary. The same seed gives the same bytes on every machine. Requests take rows in a
/// circle, so that a large request repeats them: making random numbers must not take longer than
/// sending them. Thread-safe once created.
class RowPool {
 public:
  /// For requests of up to `rows_max` rows. Errors are those of `memory`.
  static absl::StatusOr<RowPool> Create(const Head& head, Dtype dtype, int64_t rows_max,
                                        uint64_t seed, RowMemory& memory);

  /// Rows that differ from each other, >= 1.
  int64_t distinct_rows() const { return distinct_rows_; }
  int64_t hidden_size() const { return hidden_size_; }
  Dtype dtype() const { return dtype_; }
  int64_t row_bytes() const { return hidden_size_ * DtypeBytes(dtype_); }

  /// Rows 0 to rows_max, in a circle: what is sent when rows are not made anew.
  absl::Span<const std::byte> hidden() const { return hidden_.bytes(); }
  absl::Span<const int32_t> targets() const { return targets_; }

  /// Consecutive rows of the pool, [begin, begin + count).
  struct Run {
    int64_t begin;
    int64_t count;
  };
  /// Where `rows` rows lie that begin with distinct row `first`, in order.
  std::vector<Run> Runs(int64_t first, int64_t rows) const;

  /// Writes `rows` rows, beginning with distinct row `first`, and their targets.
  void Fill(int64_t first, int64_t rows, absl::Span<std::byte> hidden,
            absl::Span<int32_t> targets) const;
  /// As Fill, but the targets alone.
  void FillTargets(int64_t first, int64_t rows, absl::Span<int32_t> targets) const;

 private:
  RowPool() = default;

  int64_t distinct_rows_ = 1;
  int64_t hidden_size_ = 0;
  Dtype dtype_ = Dtype::kBf16;
  RowBuffer hidden_;              ///< [max(rows_max, distinct_rows), hidden_size]
  std::vector<int32_t> targets_;  ///< One for each row of hidden_.
};

}  // namespace logprobd::client
