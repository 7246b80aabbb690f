#pragma once

// How a lane's share of a tile's row becomes 16-bit elements in memory.
//
// Idea      A lane has two columns of every eight. It gives one pair away and gets another, so that
//           it holds four neighbours, and a quad writes 32 bytes, whole sectors, at once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/tile.h"

namespace logprobd::kernels::internal {

/// Two values as 16-bit elements of a word, low half first, rounded to nearest even.
template <class Element>
__device__ __forceinline__ uint32_t PackPair(float low, float high);

template <>
__device__ __forceinline__ uint32_t PackPair<__nv_bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
__device__ __forceinline__ uint32_t PackPair<__half>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Writes value(i), i = 0..47, the lane's columns 8 (i / 2) + lane_column + i % 2, to `tile_row`,
/// the tile's part of a row, 8-byte aligned. All lanes of the warp call it; those that do not write
/// give their values to others.
template <class Element, class Value>
__device__ __forceinline__ void StoreTileRow(Element* tile_row, int32_t lane_column, bool writes,
                                             const Value& value) {
  constexpr int kOctet = 8;
  const bool is_odd = (lane_column & 2) != 0;
  Element* const place = tile_row + (lane_column & ~3) + (is_odd ? kOctet : 0);
#pragma unroll
  for (int octet = 0; octet < kTileColumns / kOctet; octet += 2) {
    const uint32_t first = PackPair<Element>(value(2 * octet), value(2 * octet + 1));
    const uint32_t second = PackPair<Element>(value(2 * octet + 2), value(2 * octet + 3));
    const uint32_t got = __shfl_xor_sync(0xFFFFFFFFU, is_odd ? first : second, 1);
    const uint2 four = is_odd ? make_uint2(got, second) : make_uint2(first, got);
    if (writes) *reinterpret_cast<uint2*>(place + octet * kOctet) = four;
  }
}

}  // namespace logprobd::kernels::internal
