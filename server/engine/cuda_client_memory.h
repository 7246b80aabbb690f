#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/client_memory.h"
#include "server/metrics/metrics.h"

// Memory of clients on this host that GPUs read: pinned host memory, and GPU memory of their
// processes.

namespace logprobd {

/// Registers host memory with CUDA for every GPU, from the context of GPU `gpu`.
std::unique_ptr<HostPinning> CreateCudaHostPinning(int32_t gpu);

struct CudaIpcOptions {
  /// CUDA ordinals of the GPUs that score, at least one. Clients may have their memory on these
  /// GPUs and on those that all of them reach; on the latter a context is created (about 500 MiB
  /// each).
  std::vector<int32_t> gpus = {};
  int64_t mappings_max = 256;
  /// How long a mapping stays open after its last use. While it is open, memory that the client
  /// frees is not returned to the GPU.
  absl::Duration idle_time_max = absl::Seconds(1);
  Metrics* metrics = nullptr;  ///< Receives the number of open mappings; may be null.
};

/// Maps GPU memory of other processes through CUDA IPC. Each allocation is mapped once, however
/// many requests use it, and a thread closes mappings that are idle. RESOURCE_EXHAUSTED if no
/// thread can be started.
absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateCudaIpcMemory(CudaIpcOptions options);

}  // namespace logprobd
