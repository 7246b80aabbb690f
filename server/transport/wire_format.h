#pragma once

#include <cstdint>

namespace logprobd {

/// How Protobuf writes a field's value.
enum class WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kGroupBegin = 3,
  kGroupEnd = 4,
  kFixed32 = 5
};

// Protobuf reads no longer tags and lengths, so neither do we.
inline constexpr int kTagBytesMax = 5;
inline constexpr int kLengthBytesMax = 5;
inline constexpr int kVarintBytesMax = 10;

}  // namespace logprobd
