#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// Operation and element type by which shards combine their arrays. Every operation is exact and
/// associative, so the order of shards does not affect any bit.
enum class ReductionType : int32_t { kMaxInt32, kMaxUint32, kMaxUint64, kSumInt32, kSumInt64 };

constexpr int64_t ReductionBytes(ReductionType type) {
  return type == ReductionType::kMaxUint64 || type == ReductionType::kSumInt64 ? 8 : 4;
}

/// An array of one shard. Every shard has an array of the same size; the reduction combines these
/// arrays element by element and gives every shard the result.
struct Reduction {
  void* values = nullptr;  ///< [count], aligned to its element type.
  int64_t count = 0;       ///< 0 does nothing.
  ReductionType type = ReductionType::kMaxInt32;
};

}  // namespace logprobd::kernels
