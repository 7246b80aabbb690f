#pragma once

// TileEpilogue: calls a function for each row of a block tile whose rows are wgmma's operand A.
//
// Idea      HeadEpilogue and GradientEpilogue implement only what happens to one row of one tile,
//           without CUTLASS.
// Work      A thread processes two rows, eight apart, of every 64 rows of its warpgroup.
// Source    Our own.

#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "kernels/fused/lane_logits.cuh"
#include "kernels/fused/sm90/epilogue_interface.cuh"

namespace logprobd::kernels::internal {

/// Copies a register, by an instruction that the compiler does not see through: it would rename
/// registers instead, and spill.
__device__ __forceinline__ void Move(float from, float& to) {
  asm volatile("mov.b32 %0, %1;" : "=f"(to) : "f"(from));
}

/// Calls visit(logits, row, lane_column) for each row of the block tile of which the thread owns a
/// share. All lanes of a warp call it together. A row at or beyond num_rows is visited only if the
/// warp also holds a row below num_rows.
///
/// If `kLoops` is set, the code for two rows serves all: the dot products of the next rows move to
/// their registers, and `dots` are used up. Where much is done to a row, fetching the instructions
/// of four copies takes longer than running the moves.
template <bool kLoops, class BlockShape, class Coordinate, class Engine, class Layout, class Mma,
          class Visit>
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
  constexpr int kLaneRows = 2 * size<1>(Layout{});
  constexpr int kRowsAtOnce = 2;  // of kLaneRows, if kLoops
  const auto dot_of_row = [&dots](int i, int j) -> float& {
    return dots(make_coord(j % 2, i % 2, j / 2), i / 2, 0);
  };
  const auto visit_row = [&](int i, int32_t column, const auto& dot) {
    const int32_t row = block_row + get<0>(coordinates(make_coord(0, i % 2, 0), i / 2, 0));
    if (__shfl_sync(0xFFFFFFFFU, row, 0) >= num_rows) return;  // true for the whole warp
    visit(LaneLogits<std::decay_t<decltype(dot)>>{dot}, row, column);
  };
  if constexpr (kLoops) {
    static_assert(kLaneRows % kRowsAtOnce == 0);
#pragma unroll 1
    for (int i = 0; i < kLaneRows; i += kRowsAtOnce) {
      // The compiler would compute what depends on columns before the loop, and spill it.
      int32_t column = lane_column;
      asm volatile("" : "+r"(column));
#pragma unroll
      for (int j = 0; j < kRowsAtOnce; ++j) {
        visit_row(i + j, column, [&, j](int k) -> float& { return dot_of_row(j, k); });
      }
      if (i + kRowsAtOnce == kLaneRows) break;
#pragma unroll
      for (int next = kRowsAtOnce; next < kLaneRows; ++next) {
#pragma unroll
        for (int j = 0; j < kTileColumns / 4; ++j) {
          Move(dot_of_row(next, j), dot_of_row(next - kRowsAtOnce, j));
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      visit_row(i, lane_column, [&, i](int j) -> float& { return dot_of_row(i, j); });
    }
  }
}

/// RowEpilogue must have `TakeRow(logits, row, tile, lane_column)`, which processes a lane's logits
/// (lane_logits.cuh) of one row of one tile, `kHasTransforms`, and Params with `num_rows` and
/// `num_tiles` of the launch. `tile` is relative to the launch's first tile. TakeRow is also called
/// for rows at or beyond num_rows, because their quads take part in the shuffles of the warp.
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
    ForEachRow<RowEpilogue::kHasTransforms>(
        BlockShape{}, coordinate, dots, mma, thread, params_.num_rows,
        [&](const auto& logits, int32_t row, int32_t lane_column) {
          epilogue.TakeRow(logits, row, tile, lane_column);
        });
  }
};

}  // namespace logprobd::kernels::internal
