#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace logprobd::kernels {

/// The best columns of each of some rows, gathered from tiles in any order by several threads. The
/// order is total (larger logit, then lower id), so the result does not depend on who came first.
class TopRows {
 public:
  struct Entry {
    float logit;
    int32_t id;
  };

  TopRows(int64_t rows_max, int32_t top_k_max);

  static constexpr int64_t BytesOfRow(int32_t top_k_max) {
    return top_k_max * static_cast<int64_t>(sizeof(Entry)) + 16;
  }

  /// Empties rows [0, num_rows), which are to hold `top_k` entries each.
  void Reset(int64_t num_rows, int32_t top_k);

  /// Offers columns [first_column, first_column + num_columns) of a row. NaN is passed over.
  void Offer(int64_t row, const float* logits, float max_logit, int32_t first_column,
             int32_t num_columns);

  /// A row's entries so far, best first.
  const Entry* entries(int64_t row) const { return &entries_[static_cast<size_t>(row * top_k_)]; }
  int32_t count(int64_t row) const { return counts_[static_cast<size_t>(row)]; }

 private:
  int32_t top_k_ = 0;
  std::vector<Entry> entries_;   // [rows, top_k]
  std::vector<int32_t> counts_;  // [rows]
  // The worst entry's logit once a row is full, else -inf: what a tile must reach.
  std::unique_ptr<std::atomic<float>[]> thresholds_;
  std::unique_ptr<std::atomic_flag[]> locks_;
};

}  // namespace logprobd::kernels
