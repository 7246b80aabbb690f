#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// Columns of a tile, counted from column 0 of the whole vocabulary on every device and for every
/// number of rows: sums are taken in tiles, so this width is part of what fixes a result's bits.
/// 192 is what the fastest Hopper kernels share (DECISIONS.md).
inline constexpr int32_t kTileColumns = 192;

constexpr int64_t NumTiles(int64_t vocab_size) {
  return (vocab_size + kTileColumns - 1) / kTileColumns;
}

/// Exponents outside the range of any real tile.
inline constexpr int32_t kEmptyExponent = std::numeric_limits<int32_t>::min();
inline constexpr int32_t kNonfiniteExponent = std::numeric_limits<int32_t>::max();

/// Largest |exponent| of a real tile; logits beyond 2^30 in base 2 count as not finite.
inline constexpr float kExponentMax = 1073741824.0F;

/// What one tile knows of one row at one temperature. With z the logits of the tile (after scale,
/// bias and cap), c = Log2Scale of the temperature, y = c z and k = ceil(max y):
///   exponent     k; kEmptyExponent if every z is -inf; kNonfiniteExponent if any z is NaN or +inf
///   sum          sum of 2^(y - k)
///   weighted     sum of (y - k) 2^(y - k)
///   sum_squares  sum of 2^(2 (y - k)); only where asked, else 0
/// y - k is fma(z, c, -k): one rounding. The order of the sums inside a tile is fixed per engine.
struct TileSums {
  int32_t exponent;
  float sum;
  float weighted;
  float sum_squares;
};

/// Largest and smallest logit of one tile and row, before temperature; argmax is the lowest column
/// (in the whole vocabulary) that has the largest.
struct TileExtremes {
  float max_logit;
  float min_logit;
  int32_t argmax;
};

/// Where the partial of a (row, tile) lies, in partials; tiles are counted from the first that the
/// array holds.
struct PartialLayout {
  int64_t row_stride = 0;
  int64_t tile_stride = 0;

  LOGPROBD_HOST_DEVICE int64_t At(int64_t row, int64_t tile) const {
    return row * row_stride + tile * tile_stride;
  }
};

/// Up to here a block joins one row, and reads its partials best if they lie together.
inline constexpr int64_t kRowMajorRowsMax = 512;

/// Few rows: a row's partials lie together, so that blocks of one row read whole lines. More: a
/// tile's, so that the kernels that make them write whole lines.
constexpr PartialLayout PartialLayoutOf(int64_t num_rows, int64_t num_tiles) {
  return num_rows <= kRowMajorRowsMax ? PartialLayout{num_tiles, 1} : PartialLayout{1, num_rows};
}

/// An array of a shard's partials, tile `tile_begin` its first, as one that tiles of the whole
/// vocabulary index; of tiles outside the shard nothing may be touched. Null stays null.
template <typename T>
T* OfWholeVocabulary(T* partials, int64_t tile_begin, int64_t tile_stride) {
  return partials == nullptr ? nullptr : partials - tile_begin * tile_stride;
}

/// k of a tile from its largest logit; see TileSums.
LOGPROBD_HOST_DEVICE inline int32_t TileExponent(float max_logit, float log2_scale) {
  const float y = max_logit * log2_scale;
  if (y == -INFINITY) return kEmptyExponent;
  if (!(y <= kExponentMax)) return kNonfiniteExponent;  // NaN and +inf too
  return static_cast<int32_t>(ceilf(fmaxf(y, -kExponentMax)));
}

/// c of a temperature: log2(e) / temperature, rounded once; `correction` is a factor that the
/// logits themselves lack (truncation.h). Host only, so that every engine has the same bits.
inline float Log2Scale(float temperature, double correction = 1.0) {
  return static_cast<float>(1.4426950408889634 * correction / static_cast<double>(temperature));
}

}  // namespace logprobd::kernels
