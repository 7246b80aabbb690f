#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// How shards join an array of which each has its own. All are exact and associative, so that the
/// order of shards does not show in any bit.
enum class ReductionType : int32_t { kMaxInt32, kMaxUint32, kMaxUint64, kSumInt32, kSumInt64 };

constexpr int64_t ReductionBytes(ReductionType type) {
  return type == ReductionType::kMaxUint64 || type == ReductionType::kSumInt64 ? 8 : 4;
}

/// An array, of the same size on every shard, that becomes the same on every shard.
struct Reduction {
  void* values = nullptr;  ///< [count], aligned to its elements.
  int64_t count = 0;       ///< 0 does nothing.
  ReductionType type = ReductionType::kMaxInt32;
};

}  // namespace logprobd::kernels
