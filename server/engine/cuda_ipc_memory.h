#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/client_memory.h"
#include "server/metrics/metrics.h"

namespace logprobd {

struct CudaIpcOptions {
  /// CUDA ordinals of the GPUs that score, at least one. Memory may lie on them and on GPUs that
  /// all of them reach; of the latter a context is made, which takes some 500 MiB there.
  std::vector<int32_t> gpus = {};
  int64_t mappings_max = 256;
  /// How long a mapping that no request uses stays open: as long as it is, its memory is not given
  /// back when the client frees it.
  absl::Duration idle_time_max = absl::Seconds(1);
  Metrics* metrics = nullptr;  ///< Of cuda_ipc_mappings; may be null.
};

/// DeviceMemory by CUDA IPC: each allocation of a client is mapped once, however many requests use
/// it, and closed by a thread of its own. RESOURCE_EXHAUSTED when no thread can be had.
absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateCudaIpcMemory(CudaIpcOptions options);

}  // namespace logprobd
