#pragma once

// Scalar device functions. Each has one fixed sequence of instructions, so that the results are
// bit-identical in every kernel that inlines it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/logit_transform.h"

namespace logprobd::kernels {

/// Returns the larger of two values, or NaN if either is NaN.
__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

/// Returns 2^x with an error of at most 2 ulp, or 0 below the normal range.
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

/// Returns true if Tanh takes its polynomial for x. If it does for x, it does for all smaller
/// magnitudes.
__device__ __forceinline__ bool IsSmallForTanh(float x) { return __fmul_rn(x, x) < 0.36F; }

/// Returns Tanh(x) if IsSmallForTanh(x): x + x^3 p(x^2), with p interpolated at Chebyshev nodes.
__device__ __forceinline__ float TanhOfSmall(float x) {
  const float square = __fmul_rn(x, x);
  float p = __fmaf_rn(-0.00626911968F, square, 0.0211109594F);
  p = __fmaf_rn(p, square, -0.0538739488F);
  p = __fmaf_rn(p, square, 0.133329153F);
  p = __fmaf_rn(p, square, -0.333333313F);
  return __fmaf_rn(__fmul_rn(p, square), x, x);
}

/// Returns Tanh(x) unless IsSmallForTanh(x): 1 - 2 / (e^(2x) + 1), which is 1 once e^(2x)
/// overflows.
__device__ __forceinline__ float TanhOfLarge(float x) {
  const float exponential = Exp2(__fmul_rn(fabsf(x), 2.88539008F));
  return copysignf(__fmaf_rn(-2.0F, Reciprocal(__fadd_rn(exponential, 1.0F)), 1.0F), x);
}

/// Returns the hyperbolic tangent with an error of at most 2 ulp. The code has no branches; the
/// CUDA library's tanhf would spill in a kernel whose registers are full of dot products.
__device__ __forceinline__ float Tanh(float x) {
  return IsSmallForTanh(x) ? TanhOfSmall(x) : TanhOfLarge(x);
}

/// Returns scale * dot + bias.
__device__ __forceinline__ float Affine(float dot, float bias, const LogitTransform& transform) {
  return __fmaf_rn(dot, transform.scale, bias);
}

/// Returns z = cap(scale * dot + bias).
__device__ __forceinline__ float LogitOf(float dot, float bias, const LogitTransform& transform) {
  const float z = Affine(dot, bias, transform);
  if (transform.softcap <= 0.0F) return z;
  return __fmul_rn(transform.softcap, Tanh(__fmul_rn(z, Reciprocal(transform.softcap))));
}

/// Rounds two fp32 values to nearest even and packs them into one word, `low` in the lower half.
/// Element is __nv_bfloat16 or __half.
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

}  // namespace logprobd::kernels
