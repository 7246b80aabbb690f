#pragma once

// How device code takes a tile's sums: shared by the kernels that hold a tile's logits in
// registers, so that they give the same bits.
//
// Order     A tile's columns form eight chains, chain i the columns i, i + 8, i + 16, ... in rising
//           order: what wgmma's layout of sums gives each lane (two chains, columns 2q and 2q + 1
//           of every eight, for lane q of a quad). The chains are joined as a butterfly: 2q with
//           2q + 1, then the quads' lanes across 1, then across 2.
// Numerics  fp32. y - k is one fma; 2^x is ex2.approx (2 ulp), 0 below -126. No fma is left to the
//           compiler.

#include <cstdint>

#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

inline constexpr int kTileChains = 8;
inline constexpr int kChainColumns = kTileColumns / kTileChains;  // 24

/// The larger, or NaN if either is.
__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Hyperbolic tangent, to 2 ulp, without branches: the library's own would spill in a kernel whose
/// registers are full of dot products. Small arguments: x + x^3 p(x^2), p interpolated at Chebyshev
/// nodes; others: 1 - 2 / (e^(2x) + 1), which is 1 once the power overflows.
__device__ __forceinline__ float Tanh(float x) {
  const float square = __fmul_rn(x, x);
  float p = __fmaf_rn(-0.00626911968F, square, 0.0211109594F);
  p = __fmaf_rn(p, square, -0.0538739488F);
  p = __fmaf_rn(p, square, 0.133329153F);
  p = __fmaf_rn(p, square, -0.333333313F);
  const float small = __fmaf_rn(__fmul_rn(p, square), x, x);
  const float power = Exp2(__fmul_rn(fabsf(x), 2.88539008F));
  const float large = __fmaf_rn(-2.0F, Reciprocal(__fadd_rn(power, 1.0F)), 1.0F);
  return square < 0.36F ? small : copysignf(large, x);
}

/// z = cap(scale * dot + bias). Rounds the same wherever it is inlined.
__device__ __forceinline__ float LogitOf(float dot, float bias, const LogitTransform& transform) {
  const float z = __fmaf_rn(dot, transform.scale, bias);
  if (transform.softcap <= 0.0F) return z;
  return __fmul_rn(transform.softcap, Tanh(__fmul_rn(z, Reciprocal(transform.softcap))));
}

/// What y - k is measured from: the tile's exponent, 0 where it is not real.
struct TileOrigin {
  int32_t exponent;
  bool is_real;
  float k;
};

__device__ __forceinline__ TileOrigin TileOriginOf(float max_logit, float log2_scale) {
  TileOrigin origin;
  origin.exponent = TileExponent(max_logit, log2_scale);
  origin.is_real = origin.exponent != kEmptyExponent && origin.exponent != kNonfiniteExponent;
  origin.k = origin.is_real ? static_cast<float>(origin.exponent) : 0.0F;
  return origin;
}

/// Sums of one chain of columns.
struct ChainSums {
  float sum = 0.0F;
  float weighted = 0.0F;
  float squares = 0.0F;

  /// Where a logit may be -inf, kHasFloor keeps 0 * inf away; the bits are the same without, since
  /// below the floor the power is 0 anyway. Returns the power.
  template <bool kSquares, bool kHasFloor>
  __device__ __forceinline__ float Add(float logit, float log2_scale, float k) {
    float shifted = __fmaf_rn(logit, log2_scale, -k);
    if constexpr (kHasFloor) shifted = fmaxf(shifted, -200.0F);
    const float power = Exp2(shifted);
    sum = __fadd_rn(sum, power);
    weighted = __fmaf_rn(shifted, power, weighted);
    if constexpr (kSquares) squares = __fmaf_rn(power, power, squares);
    return power;
  }

  __device__ __forceinline__ void Join(const ChainSums& other) {
    sum = __fadd_rn(sum, other.sum);
    weighted = __fadd_rn(weighted, other.weighted);
    squares = __fadd_rn(squares, other.squares);
  }
};

/// Joins the chains of lanes `mask` apart; both get the same bits. All lanes of the warp call it.
template <bool kSquares>
__device__ __forceinline__ void JoinLanes(ChainSums& chain, int mask) {
  ChainSums other;
  other.sum = __shfl_xor_sync(0xFFFFFFFFU, chain.sum, mask);
  other.weighted = __shfl_xor_sync(0xFFFFFFFFU, chain.weighted, mask);
  if constexpr (kSquares) other.squares = __shfl_xor_sync(0xFFFFFFFFU, chain.squares, mask);
  chain.Join(other);
}

__device__ __forceinline__ void StoreTileSums(TileSums* out, const TileOrigin& origin,
                                              const ChainSums& chain) {
  *reinterpret_cast<float4*>(out) =
      origin.is_real
          ? make_float4(__int_as_float(origin.exponent), chain.sum, chain.weighted, chain.squares)
          : make_float4(__int_as_float(origin.exponent), 0.0F, 0.0F, 0.0F);
}

}  // namespace logprobd::kernels
