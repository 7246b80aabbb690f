#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/weights/random_access_bytes.h"

namespace logprobd::testing {

/// A file in memory that counts the bytes read from it.
class MemoryBytes final : public RandomAccessBytes {
 public:
  explicit MemoryBytes(std::string bytes) : bytes_(std::move(bytes)) {}

  int64_t size_bytes() const override { return static_cast<int64_t>(bytes_.size()); }

  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    const auto length = static_cast<int64_t>(out.size());
    if (offset < 0 || offset > size_bytes() || length > size_bytes() - offset) {
      return absl::OutOfRangeError("beyond the end");
    }
    if (length > 0) {
      std::memcpy(out.data(), bytes_.data() + offset, out.size());
    }
    read_bytes_ += length;
    return absl::OkStatus();
  }

  int64_t read_bytes() const { return read_bytes_; }

 private:
  std::string bytes_;
  mutable int64_t read_bytes_ = 0;
};

}  // namespace logprobd::testing
