#pragma once

#include <cstdint>

#include "kernels/common/tile.h"

namespace logprobd::torch_ops {

/// How the fused kernels' cache holds a row of a shard: its exponentials and their exponents
/// (kernels::CachedExponentials), its largest logit (of leveled exponentials not written) and its
/// target's, in bytes. Rows are whole tiles of exponentials apart. T: int64_t, or a symbolic one.
template <typename T>
struct KeptRow {
  T num_tiles;

  static constexpr int64_t kTileBytes = 2 * kernels::kTileColumns;
  static constexpr int64_t kKeyBytes = 8;
  static constexpr int64_t kLogitBytes = 4;

  T exponents() const { return num_tiles * kTileBytes; }
  /// A LogitKey, aligned as it must be.
  T max_key() const {
    const T after_exponents = num_tiles * (kTileBytes + static_cast<int64_t>(sizeof(int32_t)));
    return (after_exponents + kKeyBytes - 1) / kKeyBytes * kKeyBytes;
  }
  T target_logit() const { return max_key() + kKeyBytes; }
  /// Tiles of exponentials from row to row.
  T row_tiles() const { return (target_logit() + kLogitBytes + kTileBytes - 1) / kTileBytes; }
  T row_bytes() const { return row_tiles() * kTileBytes; }
};

/// Of a shard whose weight has so many rows.
template <typename T>
KeptRow<T> KeptRowOf(const T& columns) {
  return {(columns + kernels::kTileColumns - 1) / int64_t{kernels::kTileColumns}};
}

}  // namespace logprobd::torch_ops
