#include "kernels/torch_ops/device_memory.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "kernels/torch_ops/device_arrays.h"

namespace logprobd::torch_ops {

int64_t FreeBytes(int64_t device, int64_t enough) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(index);
  const int64_t unused = stats.reserved_bytes[0].current - stats.allocated_bytes[0].current;
  if (unused >= enough) return unused;
  const c10::cuda::CUDAGuard on_device(index);
  size_t free = 0;
  size_t total = 0;
  CheckLaunch(cudaMemGetInfo(&free, &total), "the free memory of a GPU");
  return unused + static_cast<int64_t>(free);
}

}  // namespace logprobd::torch_ops
