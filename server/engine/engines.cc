#include "server/engine/engines.h"

#include <utility>

#include "absl/status/status.h"
#include "server/base/head_info.h"
#include "server/engine/cpu_engine.h"
#include "server/engine/cuda_client_memory.h"
#include "server/engine/cuda_engine.h"

namespace logprobd {

absl::StatusOr<EnginePlan> PlanEngine(const HeadInfo& head, const EngineOptions& options) {
  switch (options.device) {
    case Device::kCpu:
      return PlanCpuEngine(head, options, "device cpu was requested");
    case Device::kCuda:
      return PlanCudaEngine(head, options, "device cuda was requested");
    case Device::kAuto:
      break;
  }
  const std::string why_no_cuda = WhyNoCuda();
  // A user who names GPUs, shards or replicas expects GPUs, and falling back to a CPU would only be
  // slow.
  const bool expects_gpus = !options.gpus.empty() || options.shards > 0 || options.replicas > 0;
  return why_no_cuda.empty() || expects_gpus
             ? PlanCudaEngine(head, options, "a CUDA device was found")
             : PlanCpuEngine(head, options, why_no_cuda);
}

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options) {
  return plan.device == Device::kCuda ? CreateCudaEngines(weights, plan, options)
                                      : CreateCpuEngines(weights, plan, options);
}

std::unique_ptr<HostPinning> CreateHostPinning(const EnginePlan& plan) {
  if (plan.device != Device::kCuda) return std::make_unique<NoPinning>();
  return CreateCudaHostPinning(GpusOf(plan.layout).front());
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateDeviceMemory(const EnginePlan& plan,
                                                                 Metrics& metrics) {
  if (plan.device != Device::kCuda) {
    return absl::FailedPreconditionError(
        "--cuda-ipc: the head is scored on a CPU, which cannot read the memory of GPUs");
  }
  CudaIpcOptions options;
  options.gpus = GpusOf(plan.layout);
  options.metrics = &metrics;
  return CreateCudaIpcMemory(std::move(options));
}

}  // namespace logprobd
