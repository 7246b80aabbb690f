#pragma once

// TransformLogits: scales, biases and caps the logits that a lane holds.
//
// Idea      Dot products become logits in one pass before anything else is done to them, in loops
//           without branches.
// Work      The logits of one row or of a pair of rows, of one lane.
// Traffic   Reads the bias, if there is one, from the second-level cache.
// Numerics  Those of LogitOf, bit for bit.
// Limits    All lanes of a warp must call it.
// Source    Our own.

#include <cstdint>

#include "kernels/common/device_math.cuh"
#include "kernels/common/logit_transform.h"

namespace logprobd::kernels::internal {

/// Caps a lane's logits, with the bits of LogitOf.
template <class Logits>
__device__ __forceinline__ void CapLogits(const Logits& logits, float softcap) {
  static_assert(Logits::kCount % 2 == 0);
  const float reciprocal = Reciprocal(softcap);
  float largest[2] = {0.0F, 0.0F};
#pragma unroll
  for (int i = 0; i < Logits::kCount; ++i) {
    largest[i % 2] = MaxOrNan(largest[i % 2], fabsf(logits.z(i)));
  }
  const float edge = __fmul_rn(MaxOrNan(largest[0], largest[1]), reciprocal);
  // Rounding is monotonic, so the others are small too. Most logits of a model are.
  if (__all_sync(0xFFFFFFFFU, IsSmallForTanh(edge))) {
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) {
      logits.z(i) = __fmul_rn(softcap, TanhOfSmall(__fmul_rn(logits.z(i), reciprocal)));
    }
    return;
  }
  // Where registers are scarce, the compiler keeps the order of the code, so logits that are to be
  // computed side by side must stand side by side.
  constexpr int kBatch = Logits::kCount % 4 == 0 ? 4 : 2;
#pragma unroll
  for (int i = 0; i < Logits::kCount; i += kBatch) {
    float large[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      logits.z(i + j) = __fmul_rn(logits.z(i + j), reciprocal);
      large[j] = TanhOfLarge(logits.z(i + j));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      float& x = logits.z(i + j);
      x = __fmul_rn(softcap, IsSmallForTanh(x) ? TanhOfSmall(x) : large[j]);
    }
  }
}

/// Turns the dot products of a lane into logits, with the bits of LogitOf. `Logits` has z(i), i = 0
/// to kCount - 1, and Column(i), relative to the lane's first column (LaneLogits). `bias` is null
/// or an array in which `first_column` is the lane's first column. All lanes of a warp must call
/// it. Branches stand outside of loops, because one inside would keep the compiler from computing
/// logits side by side.
template <class Logits>
__device__ __forceinline__ void TransformLogits(const Logits& logits, const float* bias,
                                                int32_t first_column,
                                                const LogitTransform& transform) {
  if (bias == nullptr) {
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) {
      logits.z(i) = Affine(logits.z(i), 0.0F, transform);  // no bias
    }
  } else {
    const float* const lane_bias = bias + first_column;
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) {
      logits.z(i) = Affine(logits.z(i), lane_bias[Logits::Column(i)], transform);
    }
  }
  if (transform.softcap > 0.0F) CapLogits(logits, transform.softcap);
}

}  // namespace logprobd::kernels::internal
