#pragma once

// TileEpilogue: the interface that CUTLASS's kernels require of an epilogue, for epilogues that
// read dot products from the accumulator registers.
//
// Idea      Base class of HeadEpilogue and GradientEpilogue. A derived class implements only what
//           happens to one row of one tile; the members that CUTLASS requires and that do nothing
//           here are in this class.
// Work      A thread processes two rows, eight apart, of every 64 rows of its warpgroup.

#include <cstddef>
#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/detail.hpp"
#include "kernels/fused_sm90/lane_logits.cuh"

namespace logprobd::kernels::internal {

/// EpilogueParams must have `num_rows` and `num_tiles` of the launch. Derived must have
/// `TakeRow(logits, row, tile, lane_column)`, which processes a lane's logits (lane_logits.cuh) of
/// one row of one tile. `tile` is relative to the launch's first tile. TakeRow is also called for
/// rows at or beyond num_rows, because their quads take part in the shuffles of the warp.
template <class Derived, class EpilogueParams>
class TileEpilogue {
 public:
  using EpilogueSchedule = cutlass::gemm::EpilogueDefault;
  using DispatchPolicy = EpilogueSchedule;
  using ElementC = float;
  using ElementD = float;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideD = StrideC;
  using Arguments = EpilogueParams;
  using Params = EpilogueParams;
  struct SharedStorage {};

  template <class Problem>
  static constexpr Params to_underlying_arguments(const Problem&, const Arguments& arguments,
                                                  void*) {
    return arguments;
  }
  template <class Problem>
  static size_t get_workspace_size(const Problem&, const Arguments&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE explicit TileEpilogue(const Params& params) : params_(params) {}

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
  const Params& params_;
};

}  // namespace logprobd::kernels::internal
