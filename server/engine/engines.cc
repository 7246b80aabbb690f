#include "server/engine/engines.h"

#include <utility>

#include "server/base/errors.h"
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
  absl::StatusOr<EnginePlan> cuda = PlanCudaEngine(head, options, "a CUDA device was found");
  if (cuda.ok()) return cuda;
  return PlanCpuEngine(head, options, std::string(cuda.status().message()));
}

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options) {
  std::vector<std::unique_ptr<ScoringEngine>> engines;
  LOGPROBD_ASSIGN_OR_RETURN(engines.emplace_back(), plan.device == Device::kCuda
                                                        ? CreateCudaEngine(weights, plan, options)
                                                        : CreateCpuEngine(weights, plan, options));
  return engines;
}

}  // namespace logprobd
