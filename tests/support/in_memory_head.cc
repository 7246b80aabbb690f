#include "tests/support/in_memory_head.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "tests/support/half_floats.h"

namespace logprobd::testing {
namespace {

/// Returns the next value of SplitMix64. The distributions of the standard library are not used,
/// because they differ between implementations.
uint64_t NextRandom(uint64_t& state) {
  state += 0x9E3779B97F4A7C15U;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

}  // namespace

std::vector<std::byte> EncodeFloats(absl::Span<const float> values, Dtype dtype) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(DtypeBytes(dtype)));
  if (dtype == Dtype::kF32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = dtype == Dtype::kBf16 ? ToBf16(values[i]) : ToF16(values[i]);
    std::memcpy(&bytes[2 * i], &bits, sizeof(bits));
  }
  return bytes;
}

InMemoryHead::InMemoryHead(HeadInfo info, std::vector<std::byte> weight, std::vector<float> bias)
    : info_(std::move(info)),
      weight_(std::move(weight)),
      bias_(std::move(bias)),
      failing_row_(info_.vocab_rows) {
  info_.weight_bytes = info_.vocab_rows * info_.hidden_size * DtypeBytes(info_.dtype);
  info_.has_bias = !bias_.empty();
  LOGPROBD_CHECK(static_cast<int64_t>(weight_.size()) == info_.weight_bytes, weight_.size(), " ",
                 info_.weight_bytes);
}

absl::Status InMemoryHead::ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                                    int64_t row_pitch_bytes) const {
  if (row_begin < 0 || row_begin > row_end || row_end > info_.vocab_rows) {
    return absl::OutOfRangeError(absl::StrCat("rows ", row_begin, " to ", row_end));
  }
  if (row_end > failing_row_) {
    return failure_;
  }
  const int64_t row_bytes = info_.hidden_size * DtypeBytes(info_.dtype);
  for (int64_t row = row_begin; row < row_end; ++row) {
    std::memcpy(out + (row - row_begin) * row_pitch_bytes, weight_.data() + row * row_bytes,
                static_cast<size_t>(row_bytes));
  }
  return absl::OkStatus();
}

void InMemoryHead::FailReadsFrom(int64_t row, absl::Status status) {
  failing_row_ = row;
  failure_ = std::move(status);
}

std::vector<float> NormalValues(int64_t count, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  uint64_t state = seed * 0x2545F4914F6CDD1DU + 1U;
  for (float& value : values) {
    // Box-Muller transform; the first uniform value lies in (0, 1].
    const double u = (static_cast<double>(NextRandom(state) >> 11) + 1.0) * 0x1p-53;
    const double v = static_cast<double>(NextRandom(state) >> 11) * 0x1p-53;
    value = static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
  }
  return values;
}

std::unique_ptr<InMemoryHead> MakeRandomHead(const RandomHeadOptions& options) {
  HeadInfo info;
  info.name = "test";
  info.model_type = "random";
  info.tensor = "lm_head.weight";
  info.hidden_size = options.hidden_size;
  info.vocab_size = options.vocab_size;
  info.vocab_rows = options.vocab_size + options.padding_rows;
  info.dtype = options.dtype;
  info.scale = options.scale;
  info.softcap = options.softcap;
  std::vector<float> weight =
      NormalValues(options.vocab_size * options.hidden_size, options.seed * 2 + 1);
  const auto factor =
      static_cast<float>(options.logit_stddev / std::sqrt(static_cast<double>(info.hidden_size)));
  for (float& value : weight) {
    value *= factor;
  }
  weight.resize(static_cast<size_t>(info.vocab_rows * info.hidden_size),
                std::numeric_limits<float>::quiet_NaN());
  std::vector<float> bias;
  if (options.bias) {
    bias = NormalValues(info.vocab_rows, options.seed * 2 + 2);
  }
  return std::make_unique<InMemoryHead>(info, EncodeFloats(weight, options.dtype), std::move(bias));
}

}  // namespace logprobd::testing
