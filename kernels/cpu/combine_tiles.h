#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"

// Combines the results of a row's tiles: its sums, and its largest logits.
namespace logprobd::kernels {

/// Largest number of rows that CombineTiles accepts. The sums of this many rows for one tile fill
/// two cache lines.
inline constexpr int64_t kCombineRows = 8;

/// Combines the sums of all tiles of `num_rows` rows (1 to kCombineRows). The sums of row r in tile
/// t are tiles[t * tile_stride + r]. The results are bit-identical to those of AddTile in
/// row_sums.h, but arithmetic that is exact for these operands replaces the calls to the math
/// library.
void CombineTiles(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
                  RowSums* rows);

/// First half of CombineTiles: sets each row's exponent to the largest over these tiles and its
/// sums to 0.
void MaxExponents(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
                  RowSums* rows);

/// Second half of CombineTiles: adds the sums of these tiles to rows whose exponents are final.
void AddTiles(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
              RowSums* rows);

/// Collects the k largest logits of each row. Several threads offer tiles in any order.
/// The order is total (larger logit first, then lower id), so the result does not depend on the
/// order in which tiles are offered.
class TopRows {
 public:
  struct Entry {
    float logit;
    int32_t id;
  };

  TopRows(int64_t rows_max, int32_t top_k_max);

  /// Bytes that a TopRows allocates per row.
  static constexpr int64_t BytesOfRow(int32_t top_k_max) {
    return top_k_max * static_cast<int64_t>(sizeof(Entry)) + 16;
  }

  /// Empties rows [0, num_rows); each will hold up to `top_k` entries.
  void Reset(int64_t num_rows, int32_t top_k);

  /// Offers columns [first_column, first_column + num_columns) of a row, whose largest logit is
  /// `max_logit`. NaN is skipped. Thread-safe.
  void Offer(int64_t row, const float* logits, float max_logit, int32_t first_column,
             int32_t num_columns);

  /// Entries of a row so far, best first.
  const Entry* entries(int64_t row) const { return &entries_[static_cast<size_t>(row * top_k_)]; }
  int32_t count(int64_t row) const { return counts_[static_cast<size_t>(row)]; }

 private:
  int32_t top_k_ = 0;
  std::vector<Entry> entries_;   // [rows, top_k]
  std::vector<int32_t> counts_;  // [rows]
  // [rows]: the smallest logit of a full row's entries, else -inf. A tile is skipped if all its
  // logits are smaller.
  std::unique_ptr<std::atomic<float>[]> thresholds_;
  std::unique_ptr<std::atomic_flag[]> locks_;
};

}  // namespace logprobd::kernels
