#include "kernels/torch_ops/paths/tile_stats.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include <limits>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"

namespace logprobd::torch_ops {
namespace {

using kernels::kFixedPointOne;
using kernels::kTileColumns;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// If a tile's exponent is this far below the row's exponent, the tile's sums are less than half a
/// quantum.
constexpr double kShiftMin = -100;

at::Tensor SumInFixedPoint(const at::Tensor& values) {
  return values.mul(kFixedPointOne).round_().to(at::kLong).sum(1);
}

}  // namespace

TileStats EmptyTiles(const at::Tensor& like_rows, int64_t num_tiles,
                     const LinearLogprobOptions& options) {
  const auto zeros = [&] {
    return like_rows.new_zeros({like_rows.size(0), num_tiles}, at::kDouble);
  };
  TileStats tiles;
  tiles.exponent = zeros().fill_(-kInfinity);
  tiles.sum = zeros();
  if (options.need_entropy) tiles.weighted = zeros();
  if (options.need_sum_p_squared) tiles.squares = zeros();
  return tiles;
}

void SumTiles(const at::Tensor& logits, const at::Tensor& log2_scales, int64_t first, int64_t tile,
              TileStats& tiles) {
  const int64_t before = first % kTileColumns;
  const int64_t after = (kTileColumns - (before + logits.size(1)) % kTileColumns) % kTileColumns;
  // y is fp64, because rounding it to fp32 would lose more accuracy than all later steps.
  at::Tensor y = logits.to(at::kDouble) * log2_scales;
  if (before > 0 || after > 0) y = at::constant_pad_nd(y, {before, after}, -kInfinity);
  y = y.view({y.size(0), -1, kTileColumns});
  const at::Tensor exponent = y.amax(2, /*keepdim=*/true).ceil_();
  const at::Tensor u = y.sub_(exponent);
  const at::Tensor exponentials = u.exp2();
  const int64_t count = y.size(1);
  tiles.exponent.narrow(1, tile, count).copy_(exponent.squeeze(2));
  tiles.sum.narrow(1, tile, count).copy_(exponentials.sum(2));
  if (tiles.weighted.defined()) {
    // -inf * 0 would be NaN.
    const at::Tensor weighted = at::where(exponentials == 0, 0, u).mul_(exponentials).sum(2);
    tiles.weighted.narrow(1, tile, count).copy_(weighted);
  }
  if (tiles.squares.defined()) {
    tiles.squares.narrow(1, tile, count).copy_(exponentials.square().sum(2));
  }
}

at::Tensor MaxExponents(const TileStats& tiles) {
  const at::Tensor empty_tile = at::full({tiles.exponent.size(0), 1}, -kInfinity,
                                         tiles.exponent.options());  // An empty shard has no tiles.
  // NaN becomes +inf, which the maximum of every collective backend preserves.
  return at::cat({tiles.exponent, empty_tile}, 1)
      .amax(1)
      .nan_to_num_(kInfinity, kInfinity, -kInfinity);
}

FixedSums SumRows(const TileStats& tiles, const at::Tensor& exponents) {
  at::Tensor shift = tiles.exponent - exponents.unsqueeze(1);
  const at::Tensor is_negligible = shift.gt(kShiftMin).logical_not_();  // true for NaN as well
  shift.masked_fill_(is_negligible, 0);
  const at::Tensor factor = shift.exp2().masked_fill_(is_negligible, 0);
  FixedSums fixed;
  fixed.sum = SumInFixedPoint(tiles.sum.nan_to_num(0) * factor);
  if (tiles.weighted.defined()) {
    const at::Tensor shifted = tiles.weighted + shift * tiles.sum;
    fixed.weighted = SumInFixedPoint(shifted.nan_to_num(0) * factor);
  }
  if (tiles.squares.defined()) {
    fixed.squares = SumInFixedPoint(tiles.squares.nan_to_num(0) * factor * factor);
  }
  return fixed;
}

}  // namespace logprobd::torch_ops
