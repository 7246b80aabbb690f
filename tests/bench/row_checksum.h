#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"

namespace logprobd::testing {

/// Returns a number in (-2^24, 0] that depends on every byte of `row` and its position. It is exact
/// in a float, so that an engine can return it as a logprob to prove which bytes it read. The size
/// of `row` is a multiple of 32.
inline float RowChecksum(absl::Span<const std::byte> row) {
  // Fletcher sums in four lanes run as fast as memory is read.
  uint64_t sums[4] = {1, 2, 3, 4};
  uint64_t sums_of_sums[4] = {0, 0, 0, 0};
  for (size_t i = 0; i + 32 <= row.size(); i += 32) {
    uint64_t words[4];
    std::memcpy(words, row.data() + i, sizeof(words));
    for (int lane = 0; lane < 4; ++lane) {
      sums[lane] += words[lane];
      sums_of_sums[lane] += sums[lane];
    }
  }
  uint64_t mixed = 0;
  for (int lane = 0; lane < 4; ++lane) {
    mixed = (mixed ^ sums[lane] ^ (sums_of_sums[lane] << 1)) * 0x9E3779B97F4A7C15ULL;
  }
  return -static_cast<float>(mixed >> 40);
}

}  // namespace logprobd::testing
