#pragma once

// Two fp32 values as one word of 16-bit elements.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace logprobd::kernels {

/// Low half first, rounded to nearest even. Element is __nv_bfloat16 or __half.
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
