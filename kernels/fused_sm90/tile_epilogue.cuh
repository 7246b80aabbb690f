#pragma once

// TileEpilogue: calls a function for each row of a block tile whose rows are wgmma's operand A.
//
// Idea      Base class of HeadEpilogue and GradientEpilogue. A derived class implements only what
//           happens to one row of one tile.
// Work      A thread processes two rows, eight apart, of every 64 rows of its warpgroup.
// Source    Our own.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "kernels/fused_sm90/epilogue_interface.cuh"
#include "kernels/fused_sm90/lane_logits.cuh"

namespace logprobd::kernels::internal {

/// EpilogueParams must have `num_rows` and `num_tiles` of the launch. Derived must have
/// `TakeRow(logits, row, tile, lane_column)`, which processes a lane's logits (lane_logits.cuh) of
/// one row of one tile. `tile` is relative to the launch's first tile. TakeRow is also called for
/// rows at or beyond num_rows, because their quads take part in the shuffles of the warp.
template <class Derived, class EpilogueParams>
class TileEpilogue : public EpilogueInterface<EpilogueParams> {
  using Base = EpilogueInterface<EpilogueParams>;

 public:
  using Base::Base;

  template <class Problem, class BlockShape, class Coordinate, class Engine, class Layout,
            class Mma, class Residue>
  CUTLASS_DEVICE void operator()(const Problem&, BlockShape, const Coordinate& coordinate,
                                 cute::Tensor<Engine, Layout>& dots, const Mma& mma, const Residue&,
                                 int thread, char*) {
    const int32_t tile = cute::get<1>(coordinate);
    if (tile >= params_.num_tiles) return;  // outside the problem
    ForEachRow(BlockShape{}, coordinate, dots, mma, thread, params_.num_rows,
               [&](const auto& logits, int32_t row, int32_t lane_column) {
                 static_cast<Derived*>(this)->TakeRow(logits, row, tile, lane_column);
               });
  }

 protected:
  using Base::params_;
};

}  // namespace logprobd::kernels::internal
