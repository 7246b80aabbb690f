#include "server/engine/engines.h"

#include <utility>

#include "server/engine/cpu_engine.h"
#include "server/engine/cuda_engine.h"

namespace logprobd {

absl::StatusOr<EnginePlan> PlanEngine(const HeadInfo& head, const EngineOptions& options) {
  switch (options.device) {
    case Device::kCpu:
      return PlanCpuEngine(head, options, "device cpu was asked for");
    case Device::kCuda:
      return PlanCudaEngine(head, options, "device cuda was asked for");
    case Device::kAuto:
      break;
  }
  const absl::Status no_cuda = CheckCudaUsable();
  // Who names GPUs, shards or replicas wants GPUs: a CPU in their place would only be slow.
  const bool wants_gpus = !options.gpus.empty() || options.shards > 0 || options.replicas > 0;
  return no_cuda.ok() || wants_gpus ? PlanCudaEngine(head, options, "a CUDA device was found")
                                    : PlanCpuEngine(head, options, std::string(no_cuda.message()));
}

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options) {
  return plan.device == Device::kCuda ? CreateCudaEngines(weights, plan, options)
                                      : CreateCpuEngines(weights, plan, options);
}

}  // namespace logprobd
