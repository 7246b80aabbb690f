#include "server/weights/widen.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace logprobd {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

float FromBf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float FromF16(uint16_t bits) {
  const float sign = (bits & 0x8000U) != 0 ? -1.0F : 1.0F;
  const int exponent = (bits >> 10) & 0x1F;
  const auto mantissa = static_cast<float>(bits & 0x3FFU);
  if (exponent == 0x1F) {
    return mantissa == 0 ? sign * std::numeric_limits<float>::infinity()
                         : std::numeric_limits<float>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -24)
                       : sign * std::ldexp(mantissa + 1024.0F, exponent - 25);
}

}  // namespace

std::vector<float> Widen(absl::Span<const std::byte> bytes, Dtype dtype) {
  const auto element_bytes = static_cast<size_t>(DtypeBytes(dtype));
  std::vector<float> values(bytes.size() / element_bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == Dtype::kF32) {
      std::memcpy(&values[i], &bytes[i * element_bytes], sizeof(float));
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, &bytes[i * element_bytes], sizeof(bits));
      values[i] = dtype == Dtype::kBf16 ? FromBf16(bits) : FromF16(bits);
    }
  }
  return values;
}

}  // namespace logprobd
