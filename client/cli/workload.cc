#include "client/cli/workload.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace logprobd::client {
namespace {

/// SplitMix64: the standard library's distributions differ between implementations, this does not.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15;
    uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    return mixed ^ (mixed >> 31);
  }

  /// In (0, 1].
  double Unit() { return static_cast<double>((Next() >> 11) + 1) * 0x1p-53; }

  /// Standard normal (Box and Muller).
  float Normal() {
    const double radius = std::sqrt(-2 * std::log(Unit()));
    return static_cast<float>(radius * std::cos(2 * std::numbers::pi * Unit()));
  }

 private:
  uint64_t state_;
};

// Larger requests repeat their rows: making random numbers must not take longer than sending them.
constexpr int64_t kDistinctElementsMax = int64_t{1} << 22;

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

Workload::Workload(const Head& head, Dtype dtype, int64_t rows, uint64_t seed) {
  Random random(seed);
  const int64_t elements = rows * head.hidden_size;
  const int64_t element_bytes = DtypeBytes(dtype);
  const int64_t distinct = std::min(elements, kDistinctElementsMax);
  hidden_.resize(static_cast<size_t>(elements * element_bytes));
  for (int64_t i = 0; i < distinct; ++i) {
    const float value = random.Normal();
    std::byte* const place = hidden_.data() + i * element_bytes;
    if (dtype == Dtype::kF32) {
      std::memcpy(place, &value, sizeof(value));
    } else {
      const uint16_t half = dtype == Dtype::kBf16 ? ToBf16(value) : ToF16(value);
      std::memcpy(place, &half, sizeof(half));
    }
  }
  for (int64_t i = distinct; i < elements; i += distinct) {
    std::memcpy(hidden_.data() + i * element_bytes, hidden_.data(),
                static_cast<size_t>(std::min(distinct, elements - i) * element_bytes));
  }
  const auto vocab = static_cast<uint64_t>(std::max<int64_t>(head.vocab_size, 1));
  for (int64_t row = 0; row < rows; ++row) {
    targets_.push_back(static_cast<int32_t>(random.Next() % vocab));
  }
  args_.hidden = hidden_;
  args_.dtype = dtype;
  args_.rows = rows;
  args_.hidden_size = head.hidden_size;
  args_.targets = targets_;
  args_.head = head.name;
}

absl::StatusOr<std::vector<int64_t>> ParseRange(absl::string_view text) {
  constexpr int64_t kValuesMax = 1'000;
  const auto malformed = [text] {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is not a range: write 4, 1:8 or 1:16:5 (start:end:step)"));
  };
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  if (parts.size() > 3) return malformed();
  int64_t numbers[3] = {0, 0, 1};
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!absl::SimpleAtoi(parts[i], &numbers[i]) || numbers[i] < 1) return malformed();
  }
  const int64_t start = numbers[0];
  const int64_t end = parts.size() == 1 ? start : numbers[1];
  const int64_t step = numbers[2];
  if (end < start || (end - start) / step >= kValuesMax) return malformed();
  std::vector<int64_t> values;
  for (int64_t i = 0; i <= (end - start) / step; ++i) values.push_back(start + i * step);
  return values;
}

}  // namespace logprobd::client
