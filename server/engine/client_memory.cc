#include "server/engine/client_memory.h"

#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "server/base/check.h"
#include "server/base/device_name.h"
#include "server/engine/cuda_host_pinning.h"
#include "server/engine/cuda_ipc_memory.h"

namespace logprobd {
namespace {

/// CUDA ordinals, each once.
std::vector<int32_t> GpusOf(const EnginePlan& plan) {
  std::vector<int32_t> gpus;
  for (const ShardPlace& place : plan.layout) {
    const std::optional<int32_t> gpu = GpuOrdinal(place.device);
    LOGPROBD_CHECK(gpu.has_value(), place.device);
    if (!absl::c_linear_search(gpus, *gpu)) gpus.push_back(*gpu);
  }
  return gpus;
}

}  // namespace

std::unique_ptr<HostPinning> CreateHostPinning(const EnginePlan& plan) {
  if (plan.device != Device::kCuda) return std::make_unique<NoPinning>();
  return CreateCudaHostPinning(GpusOf(plan).front());
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateDeviceMemory(const EnginePlan& plan,
                                                                 Metrics& metrics) {
  if (plan.device != Device::kCuda) {
    return absl::FailedPreconditionError(
        "--cuda-ipc: the head is scored on a CPU, which cannot read GPUs' memory");
  }
  CudaIpcOptions options;
  options.gpus = GpusOf(plan);
  options.metrics = &metrics;
  return CreateCudaIpcMemory(std::move(options));
}

}  // namespace logprobd
