#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// Columns that lie side by side for one hidden element.
inline constexpr int64_t kGroupColumns = 16;

/// How a head's weight lies in memory: tile after tile of kTileColumns vocabulary columns, in the
/// weight's own type, each
///   bf16        [kTileColumns / 16, ceil(hidden_size / 2), 16, 2]: pairs of hidden elements, as
///               the bf16 dot product instructions take them (16 pairs of 16 columns are one AMX
///               tile, 1 KiB without gaps); an odd last element is paired with zero
///   fp16, fp32  [kTileColumns / 16, hidden_size, 16]
/// Columns beyond the vocabulary are zero.
constexpr int64_t PackedHidden(Dtype dtype, int64_t hidden_size) {
  return dtype == Dtype::kBf16 ? (hidden_size + 1) / 2 * 2 : hidden_size;
}

constexpr int64_t PackedTileBytes(Dtype dtype, int64_t hidden_size) {
  return PackedHidden(dtype, hidden_size) * kTileColumns * DtypeBytes(dtype);
}

constexpr int64_t PackedWeightBytes(Dtype dtype, int64_t hidden_size, int64_t vocab_size) {
  return NumTiles(vocab_size) * PackedTileBytes(dtype, hidden_size);
}

/// Lays `num_columns` (1 to kTileColumns) rows of a row-major weight, [num_columns, hidden_size]
/// without gaps, out as one tile. `tile` holds PackedTileBytes.
void PackTile(Dtype dtype, const void* rows, int64_t num_columns, int64_t hidden_size, void* tile);

}  // namespace logprobd::kernels
