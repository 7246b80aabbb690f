#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// Number of columns of a tile. Tiles start at column 0 of the whole vocabulary on every device and
/// for every number of rows. Sums are computed per tile, so this width affects the bits of every
/// result. 192 is the width that the fastest Hopper kernels have in common (DECISIONS.md).
inline constexpr int32_t kTileColumns = 192;

constexpr int64_t NumTiles(int64_t vocab_size) {
  return (vocab_size + kTileColumns - 1) / kTileColumns;
}

/// Special values of TileSums::exponent, outside the range of a real tile.
inline constexpr int32_t kEmptyExponent = std::numeric_limits<int32_t>::min();
inline constexpr int32_t kNonfiniteExponent = std::numeric_limits<int32_t>::max();

/// Largest |exponent| of a real tile. Base-2 logits beyond 2^30 count as not finite.
inline constexpr float kExponentMax = 1073741824.0F;

/// Partial sums of one row over one tile at one temperature. With z the logits of the tile (after
/// scale, bias and cap), c = Log2Scale of the temperature, y = c z and k = ceil(max y):
///   exponent     k; kEmptyExponent if every z is -inf; kNonfiniteExponent if any z is NaN or +inf
///   sum          sum of 2^(y - k)
///   weighted     sum of (y - k) 2^(y - k)
///   sum_squares  sum of 2^(2 (y - k)), or 0 when it is not requested
/// y - k is fma(z, c, -k), with one rounding. Each engine adds the columns of a tile in a fixed
/// order.
struct TileSums {
  int32_t exponent;
  float sum;
  float weighted;
  float sum_squares;
};

/// Largest and smallest logit of one row over one tile, before temperature. `argmax` is the lowest
/// column, counted in the whole vocabulary, that has the largest logit.
struct TileExtremes {
  float max_logit;
  float min_logit;
  int32_t argmax;
};

/// Layout of an array of partials. Strides are in partials; tiles are counted from the first tile
/// that the array holds.
struct PartialLayout {
  int64_t row_stride = 0;
  int64_t tile_stride = 0;

  LOGPROBD_HOST_DEVICE int64_t At(int64_t row, int64_t tile) const {
    return row * row_stride + tile * tile_stride;
  }
};

/// Up to this number of rows, the partials of a row are contiguous and one block combines one row.
inline constexpr int64_t kRowMajorRowsMax = 512;

/// Returns the layout for a number of rows. With few rows the partials of a row are contiguous, so
/// that a block that combines one row reads whole cache lines. With more rows the partials of a
/// tile are contiguous, so that the kernels that write them write whole lines.
constexpr PartialLayout PartialLayoutOf(int64_t num_rows, int64_t num_tiles) {
  return num_rows <= kRowMajorRowsMax ? PartialLayout{num_tiles, 1} : PartialLayout{1, num_rows};
}

/// Offsets a pointer to a shard's partials, which start with tile `tile_begin`, so that it can be
/// indexed by tiles of the whole vocabulary. Only the shard's tiles may be accessed. Null stays
/// null.
template <typename T>
T* IndexedByVocabularyTile(T* partials, int64_t tile_begin, int64_t tile_stride) {
  return partials == nullptr ? nullptr : partials - tile_begin * tile_stride;
}

/// Returns TileSums::exponent of a tile, given its largest logit.
LOGPROBD_HOST_DEVICE inline int32_t TileExponent(float max_logit, float log2_scale) {
  const float y = max_logit * log2_scale;
  if (y == -INFINITY) return kEmptyExponent;
  if (!(y <= kExponentMax)) return kNonfiniteExponent;  // includes NaN and +inf
  return static_cast<int32_t>(ceilf(fmaxf(y, -kExponentMax)));
}

/// Returns the scale c of a temperature: log2(e) * correction / temperature, rounded once.
/// `correction` is the TruncationCorrection of the logits (logit_transform.h). This function exists
/// only for the host, so that every engine uses bit-identical scales.
inline float Log2Scale(float temperature, double correction = 1.0) {
  return static_cast<float>(1.4426950408889634 * correction / static_cast<double>(temperature));
}

}  // namespace logprobd::kernels
