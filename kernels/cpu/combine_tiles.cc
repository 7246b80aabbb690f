#include "kernels/cpu/combine_tiles.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace logprobd::kernels {
namespace {

/// Returns 2^shift for shift in [-1022, 1023].
double PowerOfTwo(int64_t shift) {
  return std::bit_cast<double>(static_cast<uint64_t>(shift + 1023) << 52);
}

/// Computes ToFixedPoint for |value| < 2^9: adding 1.5 * 2^52 rounds to the nearest integer, with
/// ties to even.
int64_t SmallToFixedPoint(double value) {
  constexpr double kRounder = 0x1.8p52;
  return static_cast<int64_t>((value * kFixedPointOne + kRounder) - kRounder);
}

void Add(RowSums& row, const TileSums& tile) {
  if (tile.exponent == kEmptyExponent || row.exponent == kNonfiniteExponent) return;
  const int64_t shift = static_cast<int64_t>(tile.exponent) - row.exponent;
  if (shift <= -100) return;
  const double factor = PowerOfTwo(shift);
  const auto sum = static_cast<double>(tile.sum);
  row.sum += SmallToFixedPoint(sum * factor);
  row.weighted += SmallToFixedPoint(
      (static_cast<double>(tile.weighted) + static_cast<double>(shift) * sum) * factor);
  row.sum_squares += SmallToFixedPoint(static_cast<double>(tile.sum_squares) * factor * factor);
}

bool Better(const TopRows::Entry& a, const TopRows::Entry& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

}  // namespace

void MaxExponents(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
                  RowSums* rows) {
  std::fill_n(rows, num_rows, RowSums{});
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const TileSums* at = tiles + tile * tile_stride;
    for (int64_t row = 0; row < num_rows; ++row) {
      rows[row].exponent = std::max(rows[row].exponent, at[row].exponent);
    }
  }
}

void AddTiles(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
              RowSums* rows) {
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const TileSums* at = tiles + tile * tile_stride;
    for (int64_t row = 0; row < num_rows; ++row) Add(rows[row], at[row]);
  }
}

void CombineTiles(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
                  RowSums* rows) {
  MaxExponents(tiles, num_tiles, tile_stride, num_rows, rows);
  AddTiles(tiles, num_tiles, tile_stride, num_rows, rows);
}

TopRows::TopRows(int64_t rows_max, int32_t top_k_max)
    : entries_(static_cast<size_t>(rows_max * top_k_max)),
      counts_(static_cast<size_t>(rows_max)),
      thresholds_(std::make_unique<std::atomic<float>[]>(static_cast<size_t>(rows_max))),
      locks_(std::make_unique<std::atomic_flag[]>(static_cast<size_t>(rows_max))) {}

void TopRows::Reset(int64_t num_rows, int32_t top_k) {
  top_k_ = top_k;
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto i = static_cast<size_t>(row);
    counts_[i] = 0;
    thresholds_[i].store(-std::numeric_limits<float>::infinity(), std::memory_order_relaxed);
  }
}

void TopRows::Offer(int64_t row, const float* logits, float max_logit, int32_t first_column,
                    int32_t num_columns) {
  const auto i = static_cast<size_t>(row);
  if (max_logit < thresholds_[i].load(std::memory_order_relaxed)) return;
  while (locks_[i].test_and_set(std::memory_order_acquire)) {
    while (locks_[i].test(std::memory_order_relaxed)) {
    }
  }
  Entry* entries = &entries_[static_cast<size_t>(row * top_k_)];
  int32_t count = counts_[i];
  float threshold = thresholds_[i].load(std::memory_order_relaxed);
  for (int32_t column = 0; column < num_columns; ++column) {
    if (!(logits[column] >= threshold)) continue;
    const Entry entry = {logits[column], first_column + column};
    if (count == top_k_ && !Better(entry, entries[count - 1])) continue;
    Entry* slot = std::lower_bound(entries, entries + count, entry, Better);
    Entry* end = entries + std::min(count, top_k_ - 1);
    std::move_backward(slot, end, end + 1);
    *slot = entry;
    count = std::min(count + 1, top_k_);
    if (count == top_k_) threshold = entries[count - 1].logit;
  }
  counts_[i] = count;
  thresholds_[i].store(threshold, std::memory_order_relaxed);
  locks_[i].clear(std::memory_order_release);
}

}  // namespace logprobd::kernels
