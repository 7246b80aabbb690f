#pragma once

// How a lane's share of a tile's row becomes 16-bit elements in memory.
//
// Idea      A lane has two columns of every eight. It gives one pair away and gets another, so that
//           it holds four neighbours, and a quad writes 32 bytes, whole sectors, at once.

#include <cstdint>

#include "kernels/common/device_math.cuh"
#include "kernels/common/tile.h"

namespace logprobd::kernels::internal {

/// The tile's part of a row, `tile_row`, 8-byte aligned, as a lane writes it. All lanes of the warp
/// do the same with theirs; those that do not write give their values to others.
template <class Element>
class TileRowStore {
 public:
  __device__ __forceinline__ TileRowStore(Element* tile_row, int32_t lane_column, bool writes)
      : place_(tile_row + (lane_column & ~3) + ((lane_column & 2) != 0 ? kOctet : 0)),
        is_odd_((lane_column & 2) != 0),
        writes_(writes) {}

  /// The lane's values i to i + 3, i = 0, 4, ..., 44; value i is that of column
  /// 8 (i / 2) + lane_column + i % 2.
  __device__ __forceinline__ void Write(int i, const float4& values) const {
    const uint32_t first = PackPair<Element>(values.x, values.y);
    const uint32_t second = PackPair<Element>(values.z, values.w);
    const uint32_t got = __shfl_xor_sync(0xFFFFFFFFU, is_odd_ ? first : second, 1);
    const uint2 four = is_odd_ ? make_uint2(got, second) : make_uint2(first, got);
    if (writes_) *reinterpret_cast<uint2*>(place_ + i / 2 * kOctet) = four;
  }

 private:
  static constexpr int kOctet = 8;

  Element* place_;
  bool is_odd_;
  bool writes_;
};

}  // namespace logprobd::kernels::internal
