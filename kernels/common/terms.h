#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// A hidden value as a sum of 16-bit terms, for products with a bf16 weight: the largest bf16 value
/// is taken off first, then the largest of what is left. Two terms hold fp16 exactly and fp32 to
/// 2^-17 relative, three fp32 exactly down to 2^-110. A row holds its terms one after another,
/// smallest first (small sums are rounded least before the large ones come), SplitPitch apart, zero
/// in between.
inline constexpr int32_t kHiddenSplitsMax = 3;

/// Terms of the rows that the engine splits.
inline constexpr int32_t kHiddenSplits = 2;

/// Terms start at multiples of this many elements: the fused kernel's step along the hidden size.
inline constexpr int64_t kSplitAlignment = 64;

/// Elements from one term of a row to the next.
constexpr int64_t SplitPitch(int64_t hidden_size) {
  return (hidden_size + kSplitAlignment - 1) / kSplitAlignment * kSplitAlignment;
}

}  // namespace logprobd::kernels
