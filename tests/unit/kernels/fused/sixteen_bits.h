#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "tests/support/half_floats.h"

namespace logprobd::testing {

/// Returns the bits of `value`, rounded to bf16 or fp16.
inline uint16_t ToBits(float value, kernels::Dtype dtype) {
  return dtype == kernels::Dtype::kBf16 ? ToBf16(value) : ToF16(value);
}

/// Returns the value of a bf16 or a finite fp16.
inline float FromBits(uint16_t bits, kernels::Dtype dtype) {
  if (dtype == kernels::Dtype::kBf16)
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const float sign = (bits & 0x8000U) != 0 ? -1.0F : 1.0F;
  const int exponent = (bits >> 10) & 0x1F;
  const int fraction = bits & 0x3FF;
  return exponent == 0 ? sign * std::ldexp(static_cast<float>(fraction), -24)
                       : sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

}  // namespace logprobd::testing
