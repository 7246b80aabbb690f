#pragma once

// SwappedGradientEpilogue: does the same as GradientEpilogue, with the same bits, where the weight
// is wgmma's operand A (swapped_mainloop.cuh) and a hidden row is a column of the accumulators.
//
// Idea      A lane holds single columns of pairs of rows. Once rounded to 16 bits, they are
//           transposed in registers, so that rows are written in whole sectors.
// Work      A lane computes six columns of two rows of every eight, and writes one row of them.
// Traffic   Reads 32 bytes of constants per row and lane, and writes 2 bytes per column in whole
//           sectors.
// Numerics  See gradient_epilogue.cuh.
// Limits    See LaunchFusedGradient.
// Source    Our own.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "kernels/fused/gradient_epilogue.cuh"
#include "kernels/fused/sm90/epilogue_interface.cuh"
#include "kernels/fused/sm90/swapped_logits.cuh"

namespace logprobd::kernels::internal {

template <class Element, bool kTransforms, int kRows>
class SwappedGradientEpilogue : public EpilogueInterface<GradientEpilogueParams<Element>> {
  using Base = EpilogueInterface<GradientEpilogueParams<Element>>;
  using Base::params_;

 public:
  using Base::Base;

  template <class Problem, class BlockShape, class Coordinate, class Engine, class Layout,
            class Mma, class Residue>
  CUTLASS_DEVICE void operator()(const Problem&, BlockShape, const Coordinate& coordinate,
                                 cute::Tensor<Engine, Layout>& dots, const Mma&, const Residue&,
                                 int thread, char*) {
    using Logits = SwappedLogits<cute::Tensor<Engine, Layout>, kRows>;
    const Logits logits{dots, thread};
    const int32_t tile = cute::get<0>(coordinate);
    const int32_t block_row = cute::get<1>(coordinate) * kRows;
    if (tile >= params_.num_tiles) return;
#pragma unroll
    for (int pair = 0; pair < Logits::kPairs; ++pair) {
      if (block_row + Logits::FirstRowOf(pair) >= params_.num_rows) return;  // the whole warp
      TakePair(logits, pair, block_row, tile * kTileColumns);
    }
  }

 private:
  /// Processes the lane's columns of two rows. The first of the eight rows that the lanes of a warp
  /// hold is below num_rows.
  template <class Logits>
  CUTLASS_DEVICE void TakePair(const Logits& logits, int pair, int32_t block_row,
                               int32_t tile_column) const {
    const int32_t first_column = tile_column + logits.first_column;
    if constexpr (kTransforms) {
      TransformLogits(SwappedPair<Logits>{logits, pair}, params_.bias, first_column,
                      params_.transform);
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int32_t row = block_row + logits.RowOf(pair, odd);
      const LogitGradient<Element, kTransforms> gradient(
          params_, row < params_.num_rows ? row : params_.num_rows - 1);
      gradient.Replace(SwappedRow<Logits>{logits, pair, odd}, first_column);
#pragma unroll
      for (int link = 0; link < Logits::kLinks; ++link) {
        if (tile_column + logits.Column(link) >= params_.num_columns) {
          logits.z(pair, odd, link) = 0.0F;
        }
      }
    }
    const SwappedRowStore<Element> store(logits, params_.gradients, params_.stride, block_row, pair,
                                         tile_column, params_.num_rows);
#pragma unroll
    for (int link = 0; link < Logits::kLinks; link += 2) {
      const auto column = [&](int of_link) {
        return PackPair<Element>(logits.z(pair, 0, of_link), logits.z(pair, 1, of_link));
      };
      store.Write(link, column(link), column(link + 1));
    }
  }
};

}  // namespace logprobd::kernels::internal
