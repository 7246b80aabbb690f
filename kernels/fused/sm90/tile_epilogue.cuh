#pragma once

// TileEpilogue: calls a function for each row of a block tile whose rows are wgmma's operand A.
//
// Idea      HeadEpilogue and GradientEpilogue implement only what happens to one row of one tile,
//           without CUTLASS.
// Work      A thread processes two rows, eight apart, of every 64 rows of its warpgroup.
// Source    Our own.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "kernels/fused/lane_logits.cuh"
#include "kernels/fused/sm90/epilogue_interface.cuh"

namespace logprobd::kernels::internal {

/// Calls visit(logits, row, lane_column) for each row of the block tile of which the thread owns a
/// share. All lanes of a warp call it together. A row at or beyond num_rows is visited only if the
/// warp also holds a row below num_rows.
template <class BlockShape, class Coordinate, class Engine, class Layout, class Mma, class Visit>
__device__ __forceinline__ void ForEachRow(BlockShape, const Coordinate& coordinate,
                                           cute::Tensor<Engine, Layout>& dots, const Mma& mma,
                                           int thread, int32_t num_rows, const Visit& visit) {
  using namespace cute;
  constexpr int kRows = size<0>(BlockShape{});
  static_assert(size<1>(BlockShape{}) == kTileColumns);
  static_assert(rank<0>(Layout{}) == 3 && size<0, 0>(Layout{}) == 2 && size<0, 1>(Layout{}) == 2 &&
                size<0, 2>(Layout{}) == kTileColumns / kTileChains && size<2>(Layout{}) == 1);
  const int32_t block_row = get<0>(coordinate) * kRows;
  if (block_row >= num_rows) return;  // outside the problem
  const Tensor coordinates =
      mma.get_thread_slice(thread).partition_C(make_identity_tensor(Shape<Int<kRows>, Int<192>>{}));
  const int32_t lane_column = get<1>(coordinates(0));
#pragma unroll
  for (int m = 0; m < size<1>(Layout{}); ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = block_row + get<0>(coordinates(make_coord(0, half, 0), m, 0));
      const int32_t warp_row = __shfl_sync(0xFFFFFFFFU, row, 0);
      if (warp_row >= num_rows) continue;  // true for the whole warp
      const auto dot = [&dots, m, half](int i) -> float& {
        return dots(make_coord(i % 2, half, i / 2), m, 0);
      };
      visit(LaneLogits<decltype(dot)>{dot}, row, lane_column);
    }
  }
}

/// RowEpilogue must have `TakeRow(logits, row, tile, lane_column)`, which processes a lane's logits
/// (lane_logits.cuh) of one row of one tile, and Params with `num_rows` and `num_tiles` of the
/// launch. `tile` is relative to the launch's first tile. TakeRow is also called for rows at or
/// beyond num_rows, because their quads take part in the shuffles of the warp.
template <class RowEpilogue>
class TileEpilogue : public EpilogueInterface<typename RowEpilogue::Params> {
  using Base = EpilogueInterface<typename RowEpilogue::Params>;
  using Base::params_;

 public:
  using Base::Base;

  template <class Problem, class BlockShape, class Coordinate, class Engine, class Layout,
            class Mma, class Residue>
  CUTLASS_DEVICE void operator()(const Problem&, BlockShape, const Coordinate& coordinate,
                                 cute::Tensor<Engine, Layout>& dots, const Mma& mma, const Residue&,
                                 int thread, char*) {
    const int32_t tile = cute::get<1>(coordinate);
    if (tile >= params_.num_tiles) return;  // outside the problem
    RowEpilogue epilogue(params_);
    ForEachRow(BlockShape{}, coordinate, dots, mma, thread, params_.num_rows,
               [&](const auto& logits, int32_t row, int32_t lane_column) {
                 epilogue.TakeRow(logits, row, tile, lane_column);
               });
  }
};

}  // namespace logprobd::kernels::internal
