#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace logprobd::client {

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

  /// Mean 1.
  double Exponential() { return -std::log(Unit()); }

 private:
  uint64_t state_;
};

}  // namespace logprobd::client
