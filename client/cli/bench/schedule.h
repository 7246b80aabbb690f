#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace logprobd::client {

/// SplitMix64. It gives the same numbers everywhere, unlike the standard library's distributions,
/// which differ between implementations.
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

  /// Uniform in (0, 1].
  double Unit() { return static_cast<double>((Next() >> 11) + 1) * 0x1p-53; }

  /// Standard normal, by the Box-Muller transform.
  float Normal() {
    const double radius = std::sqrt(-2 * std::log(Unit()));
    return static_cast<float>(radius * std::cos(2 * std::numbers::pi * Unit()));
  }

  /// Exponential with mean 1.
  double Exponential() { return -std::log(Unit()); }

 private:
  uint64_t state_;
};

/// The request sizes of one load and the weights with which they are drawn.
struct RowMix {
  struct Size {
    int64_t rows = 1;   ///< 1 to 2^24.
    double weight = 1;  ///< > 0, relative to the other weights.
  };
  std::vector<Size> sizes;  ///< At least one; no size occurs twice.

  /// Draws the size of request `index` by weight and returns its index in `sizes`. The result
  /// depends on the seed and the index only, not on the calling thread.
  size_t Draw(uint64_t seed, int64_t index) const;

  int64_t rows_max() const;
  /// "256", or "1:80,256:15".
  std::string Text() const;
};

/// Parses --rows. Either each size makes a load of its own ("1,256,8192"), or sizes with weights
/// make one mixed load ("1:80,256:15,8192:5"). Returns INVALID_ARGUMENT, which says what is wrong.
absl::StatusOr<std::vector<RowMix>> ParseRows(absl::string_view text);

/// Returns the values of "4", "1:8" or "1:16:5" (start, end, step; the end is included when a step
/// meets it). Returns INVALID_ARGUMENT unless all numbers are at least 1, start <= end and the
/// range has at most 1,000 values.
absl::StatusOr<std::vector<int64_t>> ParseRange(absl::string_view text);

/// How the requests of an open loop are spread over time.
enum class Arrivals {
  kPoisson,  ///< At random and independently, like the requests of many clients together.
  kFixed,    ///< At even intervals.
};

/// The planned times of requests, from the start of the run. The same seed gives the same times.
class ArrivalSchedule {
 public:
  /// `rate` is in requests per second, > 0.
  ArrivalSchedule(Arrivals arrivals, double rate, uint64_t seed);

  /// Returns the time at which the next request is due.
  absl::Duration Next();

 private:
  const Arrivals arrivals_;
  const double rate_;
  Random random_;
  int64_t num_planned_ = 0;
  double seconds_ = 0;
};

}  // namespace logprobd::client
