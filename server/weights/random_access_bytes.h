#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace logprobd {

/// Bytes of known length that can be read anywhere: a file, or memory in tests. Thread-safe.
class RandomAccessBytes {
 public:
  virtual ~RandomAccessBytes() = default;

  virtual int64_t size_bytes() const = 0;

  /// Fills `out` from `offset`. OUT_OF_RANGE beyond size_bytes(); DATA_LOSS when the bytes cannot
  /// be read or are no longer those of the time of opening.
  virtual absl::Status Read(int64_t offset, absl::Span<std::byte> out) const = 0;
};

}  // namespace logprobd
