#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/logits.h"

namespace logprobd::torch_ops {

/// What the tiles of a shard know of each row, as kernels/common/tile.h has it, in fp64:
/// [n, tiles].
struct TileSumsOf {
  at::Tensor exponent;  ///< k; -inf where all logits are -inf, NaN or +inf where one is.
  at::Tensor sum;       ///< sum of 2^(y - k)
  at::Tensor weighted;  ///< sum of (y - k) 2^(y - k); undefined where no entropy is needed.
};

/// Room for the sums of so many tiles; empty tiles until they are written.
TileSumsOf RoomForTiles(const at::Tensor& like_rows, int64_t num_tiles, bool need_weighted);

/// Writes the sums of a block's logits [n, columns], before temperature, at log2(e) / temperature,
/// fp64 [n, 1]; `columns` may begin and end within tiles of the whole vocabulary, of which `first`
/// is the id of the first column. They take the places from `tile` on in `tiles`.
void SumTiles(const at::Tensor& logits, const at::Tensor& log2_scales, int64_t first, int64_t tile,
              TileSumsOf& tiles);

/// Rows' sums over all tiles, int64 [n], in fixed point relative to the rows' exponents.
struct FixedSums {
  at::Tensor sum;
  at::Tensor weighted;  ///< Undefined where the tiles' is.
};

/// `exponents` [n] are the rows' largest over all shards: adding the sums over shards is exact
/// (kernels/common/row_sums.h).
FixedSums SumFixed(const TileSumsOf& tiles, const at::Tensor& exponents);

}  // namespace logprobd::torch_ops
