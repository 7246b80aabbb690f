#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace logprobd {

// The work of these functions does not depend on where the differences are, so that the time of an
// answer tells a caller nothing about the digests. Tests count the work with elements of their own.

/// Returns whether all elements are equal. Compares all of them, whatever the first ones are.
template <typename Element, size_t kSize>
bool AreEqualInConstantTime(const std::array<Element, kSize>& a,
                            const std::array<Element, kSize>& b) {
  volatile uint8_t difference = 0;  // volatile, since a compiler could end the loop early as well
  for (size_t i = 0; i < kSize; ++i) difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

/// Returns the index of the last digest that equals `wanted`, or digests.size() if none does.
/// Compares with all of them, wherever a match is.
template <typename Digest>
size_t FindInConstantTime(const std::vector<Digest>& digests, const Digest& wanted) {
  size_t found = digests.size();
  for (size_t i = 0; i < digests.size(); ++i) {
    if (AreEqualInConstantTime(digests[i], wanted)) found = i;
  }
  return found;
}

}  // namespace logprobd
