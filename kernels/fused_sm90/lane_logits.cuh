#pragma once

// How the lanes of a warpgroup share the accumulators of a block tile, and how a lane reads, sums
// and writes its share of a row.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "kernels/common/device_math.cuh"
#include "kernels/common/tile_sums.cuh"

namespace logprobd::kernels::internal {

/// A lane's share of a row: columns 8 j + 2 lane + {0, 1} of a tile, j = 0..23. This is a view of
/// the accumulators because there are not enough registers for a copy. Its indices are constants
/// once loops are unrolled.
template <class Dots>
struct LaneLogits {
  static constexpr int kCount = kTileColumns / 4;
  Dots& dots;
  int m;
  int half;

  __device__ __forceinline__ float& z(int i) const {
    return dots(cute::make_coord(i % 2, half, i / 2), m, 0);
  }

  /// Returns the column of z(i) relative to the lane's first column.
  static constexpr __device__ int Column(int i) { return i / 2 * kTileChains + i % 2; }

  /// Sums the exponentials of the lane's columns, and calls visit(i, exponentials) with those of
  /// z(i) to z(i + 3) for i = 0, 4, ...
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

  /// Returns the sums of the tile; all lanes of the quad get the same bits. Every exponential is
  /// passed once to `visit`, as in Sums.
  template <bool kSquares, class Visit>
  __device__ __forceinline__ ChainSums TileSumsOf(const TileOrigin& origin, float log2_scale,
                                                  const float* log2_scale_at,
                                                  const Visit& visit) const {
    ChainSums sums = Sums<kSquares, false>(log2_scale, origin.k, visit);
    if (isnan(sums.weighted)) {
      // The scale is read again: with the same value in both passes the compiler would keep all y -
      // k of the first pass in registers, and spill.
      const float same_scale = *static_cast<const volatile float*>(log2_scale_at);
      sums = Sums<kSquares, true>(same_scale, origin.k, [](int, const float4&) {});
    }
    JoinLanes<kSquares>(sums, 1);
    JoinLanes<kSquares>(sums, 2);
    return sums;
  }
};

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
      const LaneLogits<Tensor<Engine, Layout>> logits{dots, m, half};
      visit(logits, row, lane_column);
    }
  }
}

/// Writes a lane's share of a row of a tile as 16-bit elements to `tile_row`, 8-byte aligned. A
/// lane owns two columns of every eight. Neighbouring lanes exchange pairs, so that each holds four
/// consecutive columns and a quad writes 32 bytes, whole sectors, at once. All lanes of a warp must
/// call Write together; a lane that does not write still passes its values on.
template <class Element>
class TileRowStore {
 public:
  __device__ __forceinline__ TileRowStore(Element* tile_row, int32_t lane_column, bool writes)
      : lane_begin_(tile_row + (lane_column & ~3) + ((lane_column & 2) != 0 ? kOctet : 0)),
        is_odd_((lane_column & 2) != 0),
        writes_(writes) {}

  /// Writes the lane's values i to i + 3, i = 0, 4, ..., 44. Value i belongs to column
  /// 8 (i / 2) + lane_column + i % 2.
  __device__ __forceinline__ void Write(int i, const float4& values) const {
    WritePairs(i / 2, PackPair<Element>(values.x, values.y), PackPair<Element>(values.z, values.w));
  }

  /// Writes two pairs of elements, of columns 8 octet + lane_column + {0, 1} and of those eight
  /// further.
  __device__ __forceinline__ void WritePairs(int octet, uint32_t first, uint32_t second) const {
    const uint32_t received = __shfl_xor_sync(0xFFFFFFFFU, is_odd_ ? first : second, 1);
    const uint2 four = is_odd_ ? make_uint2(received, second) : make_uint2(first, received);
    if (writes_) *reinterpret_cast<uint2*>(lane_begin_ + octet * kOctet) = four;
  }

 private:
  static constexpr int kOctet = 8;

  Element* lane_begin_;
  bool is_odd_;
  bool writes_;
};

}  // namespace logprobd::kernels::internal
