#include "server/engine/client_memory.h"

#include <utility>

#include "absl/status/status.h"
#include "server/base/head_info.h"
#include "server/engine/cuda_host_pinning.h"
#include "server/engine/cuda_ipc_memory.h"

namespace logprobd {

std::unique_ptr<HostPinning> CreateHostPinning(const EnginePlan& plan) {
  if (plan.device != Device::kCuda) return std::make_unique<NoPinning>();
  return CreateCudaHostPinning(GpusOf(plan.layout).front());
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateDeviceMemory(const EnginePlan& plan,
                                                                 Metrics& metrics) {
  if (plan.device != Device::kCuda) {
    return absl::FailedPreconditionError(
        "--cuda-ipc: the head is scored on a CPU, which cannot read GPUs' memory");
  }
  CudaIpcOptions options;
  options.gpus = GpusOf(plan.layout);
  options.metrics = &metrics;
  return CreateCudaIpcMemory(std::move(options));
}

}  // namespace logprobd
