#pragma once

#include <cstdint>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// Element type of hidden states, weights and gradients.
enum class Dtype : int32_t { kBf16, kF16, kF32 };

constexpr int64_t DtypeBytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

// bf16 split: a hidden value is written as a sum of bf16 values, so that tensor cores can multiply
// it by a bf16 weight. The first split is the bf16 value nearest to the hidden value; each further
// split is the bf16 value nearest to the remainder. Two splits represent fp16 exactly and fp32 to a
// relative error of 2^-17; three represent fp32 exactly down to 2^-110. A row stores its splits one
// after another, SplitPitch elements apart, with zeros in between. The smallest split comes first,
// because small sums lose least to rounding before the large products are added.

/// Largest number of splits of a hidden value.
inline constexpr int32_t kHiddenSplitsMax = 3;

/// Number of splits that the engine uses.
inline constexpr int32_t kHiddenSplits = 2;

/// A split starts at a multiple of this many elements: the fused kernel's step along the hidden
/// dimension.
inline constexpr int64_t kSplitAlignment = 64;

/// Returns the number of elements from the start of one split of a row to the start of the next.
LOGPROBD_HOST_DEVICE constexpr int64_t SplitPitch(int64_t hidden_size) {
  return (hidden_size + kSplitAlignment - 1) / kSplitAlignment * kSplitAlignment;
}

}  // namespace logprobd::kernels
