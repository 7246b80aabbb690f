#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// An allocation in a GPU's memory. A server on this host can score its rows in place. Copies of a
/// CudaBuffer share the allocation, which is freed with the last of them. Thread-safe as long as
/// two threads do not write the same bytes.
class CudaBuffer {
 public:
  /// Returns a description of `bytes` bytes from `offset` for a request.
  DeviceRows Rows(int64_t offset, int64_t bytes) const;

  /// Copies from the host to byte `offset` and waits for the copy.
  absl::Status Write(int64_t offset, absl::Span<const std::byte> from);
  /// Copies `bytes` bytes on the GPU and waits for the copy.
  absl::Status Copy(int64_t offset, const CudaBuffer& from, int64_t from_offset, int64_t bytes);

 private:
  friend class CudaMemory;
  struct Allocation;
  explicit CudaBuffer(std::shared_ptr<Allocation> allocation)
      : allocation_(std::move(allocation)) {}

  std::shared_ptr<Allocation> allocation_;
};

/// Allocates memory of one GPU of this machine. It needs only the NVIDIA driver, which Open loads:
/// this program is not linked with CUDA. Thread-safe.
class CudaMemory {
 public:
  /// Opens GPU `ordinal` in the driver's order, >= 0. Returns FAILED_PRECONDITION, which says what
  /// is missing: the driver, any GPU, or this GPU. `library` is the driver's library; tests replace
  /// it.
  static absl::StatusOr<CudaMemory> Open(int32_t ordinal,
                                         const std::string& library = "libcuda.so.1");

  /// Allocates `bytes` bytes. Returns RESOURCE_EXHAUSTED if the GPU is out of memory.
  absl::StatusOr<CudaBuffer> Allocate(int64_t bytes);

 private:
  friend class CudaBuffer;
  struct Driver;
  explicit CudaMemory(std::shared_ptr<const Driver> driver) : driver_(std::move(driver)) {}

  std::shared_ptr<const Driver> driver_;
};

}  // namespace logprobd::client
