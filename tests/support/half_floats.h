#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace logprobd::testing {

/// Returns the bits of the nearest bfloat16, with ties to even. NaN stays NaN.
inline uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

/// Returns the bits of the nearest IEEE half, also if subnormal, with ties to even. NaN stays NaN.
inline uint16_t ToF16(float value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000U : 0U);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7E00U);
  if (magnitude >= 65520.0F) return static_cast<uint16_t>(sign | 0x7C00U);
  // Scale to units in the last place, so that nearbyint rounds to nearest even, also for
  // subnormals.
  const int exponent = magnitude == 0.0F ? -14 : std::max(std::ilogb(magnitude), -14);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // A carry out of the mantissa correctly increments the exponent.
  const uint32_t biased = units < 1024U ? 0U : static_cast<uint32_t>(exponent + 14);
  return static_cast<uint16_t>(sign | ((biased << 10) + units));
}

}  // namespace logprobd::testing
