#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

/// Sums of each row over each tile of a shard (kernels/common/tile.h), fp64 [n, tiles].
struct TileStats {
  at::Tensor exponent;  ///< k: -inf if all logits are -inf; NaN or +inf if one logit is.
  at::Tensor sum;       ///< Sum of 2^(y - k).
  at::Tensor weighted;  ///< Sum of (y - k) 2^(y - k); undefined unless entropy is needed.
  at::Tensor squares;   ///< Sum of 2^(2 (y - k)); undefined unless the sum of p^2 is needed.
};

/// Returns the sums of `num_tiles` tiles that contain no logits.
TileStats EmptyTiles(const at::Tensor& like_rows, int64_t num_tiles,
                     const LinearLogprobOptions& options);

/// Writes the sums of a block of logits, [n, columns], to `tiles` from index `tile` on.
/// `log2_scales`, fp64 [n, 1], is log2(e) / temperature. `first` is the vocabulary id of the first
/// column; the block may begin and end inside tiles of the whole vocabulary.
void SumTiles(const at::Tensor& logits, const at::Tensor& log2_scales, int64_t first, int64_t tile,
              TileStats& tiles);

/// Returns the largest exponent of each row over the tiles of this shard, [n].
at::Tensor MaxExponents(const TileStats& tiles);

/// Sums of rows over all tiles, int64 [n], in fixed point relative to the rows' exponents.
struct FixedSums {
  at::Tensor sum;
  at::Tensor weighted;  ///< Undefined if TileStats::weighted is undefined.
  at::Tensor squares;   ///< Undefined if TileStats::squares is undefined.
};

/// Sums the tiles of each row. `exponents` [n] holds the largest exponent of each row over all
/// shards, so that sums over shards are exact (kernels/common/row_sums.h).
FixedSums SumRows(const TileStats& tiles, const at::Tensor& exponents);

}  // namespace logprobd::torch_ops
