#pragma once

#include <array>
#include <cstdint>

namespace logprobd {

/// Names a region of shared memory or a lease: 16 random bytes, which nobody guesses.
using LocalId = std::array<uint8_t, 16>;

/// Where a client says that its rows lie in memory shared with the server: proto SharedMemorySlice.
/// As parsed: the offset is aligned, offset + bytes fits into 63 bits.
struct SharedMemorySlice {
  LocalId region = {};
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// Where a client says that its rows lie in a GPU's memory: the fields of proto CudaIpcSlice but
/// the lease. As parsed, like SharedMemorySlice.
struct DeviceSlice {
  std::array<uint8_t, 16> device_uuid = {};
  std::array<uint8_t, 64> handle = {};
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// Proto CudaIpcSlice.
struct CudaIpcSlice {
  LocalId lease = {};
  DeviceSlice memory;
};

}  // namespace logprobd
