#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// Columns that are adjacent in memory for one hidden element.
inline constexpr int64_t kGroupColumns = 16;

// Memory layout of a head's weight. Tiles of kTileColumns vocabulary columns follow one another, in
// the weight's element type:
//   bf16        [kTileColumns / 16, ceil(hidden_size / 2), 16, 2]: pairs of hidden elements, as the
//               bf16 dot product instructions require (16 pairs of 16 columns are one AMX tile, 1
//               KiB without gaps); an odd last element is paired with zero
//   fp16, fp32  [kTileColumns / 16, hidden_size, 16]
// Columns beyond the vocabulary are zero.

/// Returns the hidden elements per column in this layout, padding included.
constexpr int64_t PackedHidden(Dtype dtype, int64_t hidden_size) {
  return dtype == Dtype::kBf16 ? (hidden_size + 1) / 2 * 2 : hidden_size;
}

/// Returns the bytes of one tile.
constexpr int64_t PackedTileBytes(Dtype dtype, int64_t hidden_size) {
  return PackedHidden(dtype, hidden_size) * kTileColumns * DtypeBytes(dtype);
}

/// Returns the bytes of a whole weight.
constexpr int64_t PackedWeightBytes(Dtype dtype, int64_t hidden_size, int64_t vocab_size) {
  return NumTiles(vocab_size) * PackedTileBytes(dtype, hidden_size);
}

/// A weight as trainers store it: element (column, k) is at `data` + column * row_stride + k *
/// element_stride, in elements. Elements of a column are usually adjacent; other strides are
/// slower.
struct StridedWeight {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t element_stride = 1;

  /// Returns the part that begins at (column, k).
  StridedWeight From(Dtype dtype, int64_t column, int64_t k) const {
    const int64_t offset = (column * row_stride + k * element_stride) * DtypeBytes(dtype);
    return {static_cast<const std::byte*>(data) + offset, row_stride, element_stride};
  }
};

/// Packs `num_columns` (1 to kTileColumns) columns and the first `hidden_size` elements of each
/// into one tile. `tile` has room for PackedTileBytes.
void PackTile(Dtype dtype, const StridedWeight& weight, int64_t num_columns, int64_t hidden_size,
              void* tile);

}  // namespace logprobd::kernels
