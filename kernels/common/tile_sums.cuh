#pragma once

// Device code that sums the exponentials of a tile. Every kernel that holds a tile's logits in
// registers uses this code, so that their results are bit-identical.
//
// Order     The columns of a tile form eight chains: chain i adds columns i, i + 8, i + 16, ... in
//           ascending order. Lane q of a quad mostly owns columns 2q and 2q + 1 of every eight, as
//           wgmma distributes them; swapped_epilogue.cuh has another distribution. The chains are
//           added in a butterfly: 2q with 2q + 1, then sums one apart, then sums two apart.
// Numerics  fp32. y - k is one fma; 2^x is ex2.approx (2 ulp), which is 0 for x below -126. Every
//           fma is written out; the compiler contracts none.

#include <cstdint>

#include "kernels/common/device_math.cuh"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

inline constexpr int kTileChains = 8;
inline constexpr int kChainColumns = kTileColumns / kTileChains;  // 24

/// The exponent k of a tile, which is subtracted from every y.
struct TileOrigin {
  int32_t exponent;  ///< k, kEmptyExponent or kNonfiniteExponent.
  bool is_real;      ///< True when `exponent` is k.
  float k;           ///< k as a float, or 0 when it is not real.
};

__device__ __forceinline__ TileOrigin TileOriginOf(float max_logit, float log2_scale) {
  TileOrigin origin;
  origin.exponent = TileExponent(max_logit, log2_scale);
  origin.is_real = origin.exponent != kEmptyExponent && origin.exponent != kNonfiniteExponent;
  origin.k = origin.is_real ? static_cast<float>(origin.exponent) : 0.0F;
  return origin;
}

/// A logit's y - k and 2^(y - k).
struct Exponential {
  float shifted;
  float value;
};

/// kHasFloor must be set where a logit may be -inf: it avoids 0 * inf. For other logits it does not
/// change the bits, because below the floor the exponential is 0 in any case.
template <bool kHasFloor>
__device__ __forceinline__ Exponential ExponentialOf(float logit, float log2_scale, float k) {
  float shifted = __fmaf_rn(logit, log2_scale, -k);
  if constexpr (kHasFloor) shifted = MaxOrNan(shifted, -200.0F);
  return {shifted, Exp2(shifted)};
}

/// Sums over one chain of columns (TileSums).
struct ChainSums {
  float sum = 0.0F;
  float weighted = 0.0F;
  float squares = 0.0F;

  template <bool kSquares>
  __device__ __forceinline__ void Add(const Exponential& exponential) {
    sum = __fadd_rn(sum, exponential.value);
    weighted = __fmaf_rn(exponential.shifted, exponential.value, weighted);
    if constexpr (kSquares) {
      squares = __fmaf_rn(exponential.value, exponential.value, squares);  // sum of p^2
    }
  }

  /// Adds the exponential of one logit and returns 2^(y - k).
  template <bool kSquares, bool kHasFloor>
  __device__ __forceinline__ float Add(float logit, float log2_scale, float k) {
    const Exponential exponential = ExponentialOf<kHasFloor>(logit, log2_scale, k);
    Add<kSquares>(exponential);
    return exponential.value;
  }

  __device__ __forceinline__ void Join(const ChainSums& other) {
    sum = __fadd_rn(sum, other.sum);
    weighted = __fadd_rn(weighted, other.weighted);
    squares = __fadd_rn(squares, other.squares);
  }
};

/// Adds the chains of lanes `mask` apart; both lanes get bit-identical sums. All lanes of the warp
/// must call it.
template <bool kSquares>
__device__ __forceinline__ void JoinLanes(ChainSums& chain, int mask) {
  ChainSums other;
  other.sum = __shfl_xor_sync(0xFFFFFFFFU, chain.sum, mask);
  other.weighted = __shfl_xor_sync(0xFFFFFFFFU, chain.weighted, mask);
  if constexpr (kSquares) other.squares = __shfl_xor_sync(0xFFFFFFFFU, chain.squares, mask);
  chain.Join(other);
}

/// Writes the sums of a tile; they are 0 when the tile's exponent is not real.
__device__ __forceinline__ void StoreTileSums(TileSums* out, const TileOrigin& origin,
                                              const ChainSums& chain) {
  *reinterpret_cast<float4*>(out) =
      origin.is_real
          ? make_float4(__int_as_float(origin.exponent), chain.sum, chain.weighted, chain.squares)
          : make_float4(__int_as_float(origin.exponent), 0.0F, 0.0F, 0.0F);
}

}  // namespace logprobd::kernels
