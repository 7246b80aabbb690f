#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"

namespace logprobd {

/// Zeroed memory of the host, aligned to pages, in huge pages where the system gives them: a weight
/// is read from front to back at every batch.
class HostMemory {
 public:
  /// RESOURCE_EXHAUSTED when the system does not give `size_bytes`.
  static absl::StatusOr<HostMemory> Allocate(int64_t size_bytes);

  HostMemory() = default;
  ~HostMemory();
  HostMemory(HostMemory&& other) noexcept { *this = std::move(other); }
  HostMemory& operator=(HostMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

}  // namespace logprobd
