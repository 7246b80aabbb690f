#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// Most places of a row's list of its largest logits.
inline constexpr int32_t kTopKMax = 128;

/// A logit and its id as one number: the larger logit is larger, among equals the lower id. Never 0
/// for a real id; -0 counts as +0. NaN has some place.
struct LogitEntry {
  float logit;
  int32_t id;
};

/// A float's bits as a number that grows with it; -0 counts as +0. 0 comes from no float but one
/// NaN.
LOGPROBD_HOST_DEVICE inline uint32_t OrderedBits(float value) {
  const float unsigned_zero = value + 0.0F;
  uint32_t bits;
  memcpy(&bits, &unsigned_zero, sizeof(bits));
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

LOGPROBD_HOST_DEVICE inline float FromOrderedBits(uint32_t ordered) {
  const uint32_t bits = (ordered & 0x80000000U) != 0 ? ordered & 0x7FFFFFFFU : ~ordered;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

LOGPROBD_HOST_DEVICE inline uint64_t LogitKey(float logit, int32_t id) {
  return static_cast<uint64_t>(OrderedBits(logit)) << 32 | static_cast<uint32_t>(~id);
}

LOGPROBD_HOST_DEVICE inline LogitEntry LogitEntryOf(uint64_t key) {
  return {FromOrderedBits(static_cast<uint32_t>(key >> 32)),
          static_cast<int32_t>(~static_cast<uint32_t>(key))};
}

}  // namespace logprobd::kernels
