#include "client/cli/bench/float_formats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace logprobd::client {
namespace {

double FromF16(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = bits >> 10 & 0x1F;
  const double fraction = bits & 0x3FF;
  if (exponent == 0x1F) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(fraction, -24)
                       : sign * std::ldexp(fraction + 1024, exponent - 25);
}

}  // namespace

uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

uint16_t ToF16(float value) {
  const auto sign = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16 & 0x8000);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00;
  if (magnitude >= 65520.0F) return sign | 0x7C00;
  // Scaled so that the unit in the last place of f16 is 1, nearbyint rounds to nearest even.
  const int exponent = std::max(magnitude > 0 ? std::ilogb(magnitude) : -15, -14);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // The hidden leading bit adds 1 to the exponent field, and a carry out of the fraction one more.
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 14) << 10) + units));
}

void StoreElement(float value, Dtype dtype, std::byte* place) {
  if (dtype == Dtype::kF32) {
    std::memcpy(place, &value, sizeof(value));
    return;
  }
  const uint16_t half = dtype == Dtype::kBf16 ? ToBf16(value) : ToF16(value);
  std::memcpy(place, &half, sizeof(half));
}

double LoadElement(const std::byte* array, int64_t index, Dtype dtype) {
  const std::byte* const place = array + index * DtypeBytes(dtype);
  if (dtype == Dtype::kF32) {
    float value = 0;
    std::memcpy(&value, place, sizeof(value));
    return static_cast<double>(value);
  }
  uint16_t bits = 0;
  std::memcpy(&bits, place, sizeof(bits));
  if (dtype == Dtype::kF16) return FromF16(bits);
  return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
}

}  // namespace logprobd::client
