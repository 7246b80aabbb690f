#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// Largest k of a top-k list.
inline constexpr int32_t kTopKMax = 128;

/// A logit and its vocabulary id, decoded from a LogitKey.
struct LogitEntry {
  float logit;
  int32_t id;
};

/// Maps a float to an integer that increases with it; -0 maps to the same integer as +0. Only one
/// bit pattern, a NaN, maps to 0.
LOGPROBD_HOST_DEVICE inline uint32_t OrderedBits(float value) {
  const float unsigned_zero = value + 0.0F;
  uint32_t bits;
  memcpy(&bits, &unsigned_zero, sizeof(bits));
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

/// Inverts OrderedBits.
LOGPROBD_HOST_DEVICE inline float FromOrderedBits(uint32_t ordered) {
  const uint32_t bits = (ordered & 0x80000000U) != 0 ? ordered & 0x7FFFFFFFU : ~ordered;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/// Returns the smallest float above `value`; NaN for infinity and NaN.
LOGPROBD_HOST_DEVICE inline float NextAbove(float value) {
  return FromOrderedBits(OrderedBits(value) + 1);
}

/// Packs a logit and its id into one integer. A larger logit gives a larger key; among equal
/// logits, the lower id gives the larger key. -0 counts as +0. The key of a real id is never 0; NaN
/// has an unspecified rank.
LOGPROBD_HOST_DEVICE inline uint64_t LogitKey(float logit, int32_t id) {
  return static_cast<uint64_t>(OrderedBits(logit)) << 32 | static_cast<uint32_t>(~id);
}

/// Returns true if a logit ranks above another one: it is larger, or equal with a lower id. This is
/// the order of LogitKeys.
LOGPROBD_HOST_DEVICE inline bool RanksAbove(float logit, int32_t id, float other,
                                            int32_t other_id) {
  return logit > other || (logit == other && id < other_id);
}

/// Inverts LogitKey.
LOGPROBD_HOST_DEVICE inline LogitEntry LogitEntryOf(uint64_t key) {
  return {FromOrderedBits(static_cast<uint32_t>(key >> 32)),
          static_cast<int32_t>(~static_cast<uint32_t>(key))};
}

}  // namespace logprobd::kernels
