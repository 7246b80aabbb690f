#pragma once

// What CUTLASS's kernels ask of an epilogue that takes dot products straight from the registers.
//
// Idea      The parts that nothing is done in, once for all epilogues: what is left of each is what
//           becomes of a row in a tile.
// Work      A thread serves two rows, eight apart, of every 64 rows of its warpgroup.

#include <cstddef>
#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/detail.hpp"
#include "kernels/fused_sm90/lane_logits.cuh"

namespace logprobd::kernels::internal {

/// EpilogueParams has num_rows and num_tiles, of the launch. Derived has
/// `TakeRow(logits, row, tile, lane_column)`: a lane's logits (lane_logits.cuh) of a row in a tile,
/// counted from the launch's first. Rows from num_rows on come too: their quads shuffle.
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
    if (tile >= params_.num_tiles) return;  // beyond the problem
    ForEachRow(BlockShape{}, coordinate, dots, mma, thread, params_.num_rows,
               [&](const auto& logits, int32_t row, int32_t lane_column) {
                 static_cast<Derived*>(this)->TakeRow(logits, row, tile, lane_column);
               });
  }

 protected:
  const Params& params_;
};

}  // namespace logprobd::kernels::internal
