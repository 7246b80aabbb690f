// Stands in for memory that clients share with GPUs in a build without CUDA, where no plan names a
// GPU.

#include "server/engine/cuda_engine.h"
#include "server/engine/cuda_host_pinning.h"
#include "server/engine/cuda_ipc_memory.h"

namespace logprobd {

std::unique_ptr<HostPinning> CreateCudaHostPinning(int32_t /*gpu*/) {
  return std::make_unique<NoPinning>();
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateCudaIpcMemory(CudaIpcOptions /*options*/) {
  return CheckCudaUsable();
}

}  // namespace logprobd
