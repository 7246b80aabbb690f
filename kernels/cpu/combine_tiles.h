#pragma once

#include <cstdint>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// Most rows that CombineTiles takes: their sums of a tile fill two cache lines.
inline constexpr int64_t kCombineRows = 8;

/// Combines the sums of all tiles of `num_rows` rows (1 to kCombineRows). Row r of tile t stands at
/// tiles[t * tile_stride + r]. The same bits as AddTile of row_sums.h, whose calls of the
/// mathematical library are replaced by arithmetic that is exact for these operands.
void CombineTiles(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
                  RowSums* rows);

/// Its two halves: the rows' largest exponents over these tiles (all else zero), and the sums of
/// these tiles relative to exponents that are final.
void MaxExponents(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
                  RowSums* rows);
void AddTiles(const TileSums* tiles, int64_t num_tiles, int64_t tile_stride, int64_t num_rows,
              RowSums* rows);

}  // namespace logprobd::kernels
