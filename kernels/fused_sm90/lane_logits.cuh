#pragma once

// How the lanes of a warpgroup share the rows of a block tile, and one row of a tile.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "kernels/common/tile_sums.cuh"

namespace logprobd::kernels::internal {

/// A lane's share of a row: columns 8 j + 2 lane + {0, 1} of a tile, j = 0..23. A view of the sums
/// in place: a copy would not fit beside them. Its indices are constants once loops are unrolled.
template <class Dots>
struct LaneLogits {
  static constexpr int kCount = kTileColumns / 4;
  Dots& dots;
  int m;
  int half;

  __device__ __forceinline__ float& z(int i) const {
    return dots(cute::make_coord(i % 2, half, i / 2), m, 0);
  }

  /// Column of z(i), less the lane's first.
  static constexpr __device__ int Column(int i) { return i / 2 * kTileChains + i % 2; }

  /// Calls visit(i, exponentials) for the exponentials of z(i) to z(i + 3), i = 0, 4, ...
  template <bool kSquares, bool kHasFloor, class Visit>
  __device__ __forceinline__ ChainSums Sums(float log2_scale, float k, const Visit& visit) const {
    ChainSums even;
    ChainSums odd;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float4 exponentials;
      exponentials.x = even.template Add<kSquares, kHasFloor>(z(i), log2_scale, k);
      exponentials.y = odd.template Add<kSquares, kHasFloor>(z(i + 1), log2_scale, k);
      exponentials.z = even.template Add<kSquares, kHasFloor>(z(i + 2), log2_scale, k);
      exponentials.w = odd.template Add<kSquares, kHasFloor>(z(i + 3), log2_scale, k);
      visit(i, exponentials);
    }
    even.Join(odd);
    return even;
  }

  /// The tile's sums, the same in all lanes of the quad; `visit` as in Sums, once a power.
  template <bool kSquares, class Visit>
  __device__ __forceinline__ ChainSums TileSumsOf(const TileOrigin& origin, float log2_scale,
                                                  const float* log2_scale_at,
                                                  const Visit& visit) const {
    ChainSums sums = Sums<kSquares, false>(log2_scale, origin.k, visit);
    if (isnan(sums.weighted)) {
      // Read anew, or the compiler keeps all y - k of the first attempt for this one, and spills.
      const float same_scale = *static_cast<const volatile float*>(log2_scale_at);
      sums = Sums<kSquares, true>(same_scale, origin.k, [](int, const float4&) {});
    }
    JoinLanes<kSquares>(sums, 1);
    JoinLanes<kSquares>(sums, 2);
    return sums;
  }
};

/// Calls visit(logits, row, lane_column) for each row of the block tile that the thread shares; all
/// lanes of a warp call it together, those of rows from num_rows on only beside others.
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
  if (block_row >= num_rows) return;  // beyond the problem
  const Tensor places =
      mma.get_thread_slice(thread).partition_C(make_identity_tensor(Shape<Int<kRows>, Int<192>>{}));
  const int32_t lane_column = get<1>(places(0));
#pragma unroll
  for (int m = 0; m < size<1>(Layout{}); ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = block_row + get<0>(places(make_coord(0, half, 0), m, 0));
      const int32_t warp_row = __shfl_sync(0xFFFFFFFFU, row, 0);
      if (warp_row >= num_rows) continue;  // the whole warp
      const LaneLogits<Tensor<Engine, Layout>> logits{dots, m, half};
      visit(logits, row, lane_column);
    }
  }
}

}  // namespace logprobd::kernels::internal
