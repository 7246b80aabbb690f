#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <random>
#include <vector>

namespace logprobd::testing {

/// The random choices of one draw. The same seed gives the same choices with every standard
/// library.
class Draws {
 public:
  explicit Draws(uint32_t seed) : random_(seed) {}

  /// Returns a number in [min, max].
  int64_t Between(int64_t min, int64_t max) {
    return min + static_cast<int64_t>(random_() % static_cast<uint64_t>(max - min + 1));
  }
  /// Returns true in `percent` of 100 cases.
  bool Chance(int64_t percent) { return Between(1, 100) <= percent; }

  template <typename Container>
  auto& OneOf(Container& choices) {
    return choices[static_cast<size_t>(Between(0, std::ssize(choices) - 1))];
  }

  /// Returns an index, each as often as its weight says.
  size_t ByWeight(const std::vector<int64_t>& weights) {
    int64_t left = Between(1, std::accumulate(weights.begin(), weights.end(), int64_t{0}));
    size_t index = 0;
    while (left > weights[index]) left -= weights[index++];
    return index;
  }

 private:
  std::mt19937_64 random_;
};

/// Returns the seeds 1 to `count`, or only that of the environment variable LOGPROBD_TEST_SEED,
/// which repeats a draw that failed.
inline std::vector<uint32_t> SeedsOfDraws(uint32_t count) {
  if (const char* const seed = std::getenv("LOGPROBD_TEST_SEED"); seed != nullptr) {
    return {static_cast<uint32_t>(std::strtoul(seed, nullptr, 10))};
  }
  std::vector<uint32_t> seeds(count);
  std::iota(seeds.begin(), seeds.end(), 1U);
  return seeds;
}

}  // namespace logprobd::testing
