#include "kernels/torch_ops/tile_sums.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/where.h>

#include <limits>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"

namespace logprobd::torch_ops {
namespace {

using kernels::kFixedPointOne;
using kernels::kTileColumns;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// A tile this far below the row's exponent is under half a quantum and adds nothing.
constexpr double kShiftMin = -100;

at::Tensor ToFixed(const at::Tensor& values) {
  return values.mul(kFixedPointOne).round_().to(at::kLong).sum(1);
}

}  // namespace

TileSumsOf RoomForTiles(const at::Tensor& like_rows, int64_t num_tiles, bool need_weighted) {
  const auto zeros = [&] {
    return like_rows.new_zeros({like_rows.size(0), num_tiles}, at::kDouble);
  };
  TileSumsOf tiles;
  tiles.exponent = zeros().fill_(-kInfinity);
  tiles.sum = zeros();
  if (need_weighted) tiles.weighted = zeros();
  return tiles;
}

void SumTiles(const at::Tensor& logits, const at::Tensor& log2_scales, int64_t first, int64_t tile,
              TileSumsOf& tiles) {
  const int64_t before = first % kTileColumns;
  const int64_t after = (kTileColumns - (before + logits.size(1)) % kTileColumns) % kTileColumns;
  // In fp64: rounding y would cost more than all that follows.
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
}

FixedSums SumFixed(const TileSumsOf& tiles, const at::Tensor& exponents) {
  at::Tensor shift = tiles.exponent - exponents.unsqueeze(1);
  const at::Tensor adds_nothing = shift.gt(kShiftMin).logical_not_();  // NaN too
  shift.masked_fill_(adds_nothing, 0);
  const at::Tensor factor = shift.exp2().masked_fill_(adds_nothing, 0);
  FixedSums fixed;
  fixed.sum = ToFixed(tiles.sum.nan_to_num(0) * factor);
  if (tiles.weighted.defined()) {
    const at::Tensor moved = tiles.weighted + shift * tiles.sum;
    fixed.weighted = ToFixed(moved.nan_to_num(0) * factor);
  }
  return fixed;
}

}  // namespace logprobd::torch_ops
