#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/client_memory.h"
#include "server/metrics/metrics.h"

// Memory of clients on this host that GPUs read: pinned host memory, and GPU memory of the clients'
// processes.

namespace logprobd {

/// Creates an object that registers host memory with CUDA for every GPU, in the context of GPU
/// `gpu`.
std::unique_ptr<HostPinning> CreateCudaHostPinning(int32_t gpu);

struct CudaIpcOptions {
  /// CUDA ordinals of the GPUs that score, at least one. The memory of clients may be on these GPUs
  /// and on the GPUs that all of them can access; on each of the latter, CUDA creates a context
  /// (about 500 MiB).
  std::vector<int32_t> gpus = {};
  int64_t mappings_max = 256;
  /// Time for which a mapping stays open after its last use. While it is open, memory that the
  /// client frees is not returned to the GPU.
  absl::Duration idle_time_max = absl::Seconds(1);
  Metrics* metrics = nullptr;  ///< Receives the number of open mappings; may be null.
};

/// Creates an object that maps GPU memory of other processes through CUDA IPC. Each allocation is
/// mapped once, however many requests use it, and a thread closes idle mappings. Returns
/// RESOURCE_EXHAUSTED if the thread cannot be started.
absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateCudaIpcMemory(CudaIpcOptions options);

}  // namespace logprobd
