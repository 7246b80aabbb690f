#pragma once

// A lane's share of a row of a tile, and how it is read, summed and written. The accumulators of
// wgmma and of mma.sync have the same layout, so the kernels of every architecture use this code.

#include <cstdint>

#include "kernels/common/device_math.cuh"
#include "kernels/common/tile_sums.cuh"

namespace logprobd::kernels::internal {

/// A lane's share of a row: columns 8 j + 2 lane + {0, 1} of a tile, j = 0..23. This is a view of
/// the accumulators because there are not enough registers for a copy: dot(i) returns a reference
/// to the accumulator of column 8 (i / 2) + 2 lane + i % 2. Its indices are constants once loops
/// are unrolled.
template <class Dot>
struct LaneLogits {
  static constexpr int kCount = kTileColumns / 4;
  Dot dot;

  __device__ __forceinline__ float& z(int i) const { return dot(i); }

  /// Returns the column of z(i) relative to the lane's first column.
  static constexpr __device__ int Column(int i) { return i / 2 * kTileChains + i % 2; }

  /// Sums the exponentials of the lane's columns, and calls visit(i, exponentials) with those of
  /// z(i) to z(i + 3) for i = 0, 4, ...
  template <bool kSquares, bool kHasFloor, class Visit>
  __device__ __forceinline__ ChainSums Sums(float log2_scale, float k, const Visit& visit) const {
    // The compiler keeps the order of a batch and so computes its exponentials side by side.
    constexpr int kBatch = 4;
    static_assert(kCount % kBatch == 0 && kBatch % 4 == 0);
    ChainSums even;
    ChainSums odd;
#pragma unroll
    for (int i = 0; i < kCount; i += kBatch) {
      Exponential batch[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        batch[j] = ExponentialOf<kHasFloor>(z(i + j), log2_scale, k);  // side by side
      }
#pragma unroll
      for (int j = 0; j < kBatch; j += 2) {
        even.template Add<kSquares>(batch[j]);
        odd.template Add<kSquares>(batch[j + 1]);
      }
#pragma unroll
      for (int j = 0; j < kBatch; j += 4) {
        visit(i + j, make_float4(batch[j].value, batch[j + 1].value, batch[j + 2].value,
                                 batch[j + 3].value));
      }
    }
    even.Join(odd);
    return even;
  }

  /// Returns the largest logit of the lane, or NaN if one is.
  __device__ __forceinline__ float Max() const {
    float max_logits[4] = {z(0), z(1), z(2), z(3)};  // side by side
#pragma unroll
    for (int i = 4; i < kCount; ++i) max_logits[i % 4] = MaxOrNan(max_logits[i % 4], z(i));
    return MaxOrNan(MaxOrNan(max_logits[0], max_logits[1]), MaxOrNan(max_logits[2], max_logits[3]));
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
