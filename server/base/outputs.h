#pragma once

#include <cstdint>

namespace logprobd {

/// What a request asks of every row: a set of bits, values as in proto Output.
///
/// Top-k, candidates and segments are asked by their own fields and are not bits here.
enum class Output : uint32_t {
  kLogprob = 1,
  kEntropy = 2,
  kLse = 4,
  kArgmax = 8,
  kGreedy = 16,
  kSumPSquared = 32,
  kMaxLogit = 64,
  kMinLogit = 128,
};

class OutputSet {
 public:
  static constexpr uint32_t kAllBits = 255;

  constexpr OutputSet() = default;
  constexpr explicit OutputSet(uint32_t bits) : bits_(bits) {}

  constexpr bool Has(Output output) const { return (bits_ & static_cast<uint32_t>(output)) != 0; }
  constexpr OutputSet With(Output output) const {
    return OutputSet(bits_ | static_cast<uint32_t>(output));
  }
  constexpr OutputSet Union(OutputSet other) const { return OutputSet(bits_ | other.bits_); }
  constexpr uint32_t bits() const { return bits_; }
  constexpr bool empty() const { return bits_ == 0; }

 private:
  uint32_t bits_ = 0;
};

/// What a request with outputs = 0 gets.
inline constexpr OutputSet kDefaultOutputs =
    OutputSet().With(Output::kLogprob).With(Output::kEntropy);

}  // namespace logprobd
