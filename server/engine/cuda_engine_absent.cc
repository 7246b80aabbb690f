// Stands in for the CUDA engine in a build without CUDA.

#include "server/engine/cuda_engine.h"

namespace logprobd {

absl::Status CheckCudaUsable() {
  return absl::FailedPreconditionError(
      "this build has no CUDA: install the CUDA toolkit 13 or later (nvcc and cuBLAS) and build "
      "with -DLOGPROBD_CUDA=ON, or use --device cpu");
}

absl::StatusOr<EnginePlan> PlanCudaEngine(const HeadInfo& /*head*/,
                                          const EngineOptions& /*options*/,
                                          std::string /*reason*/) {
  return CheckCudaUsable();
}

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateCudaEngines(
    const HeadWeights& /*weights*/, const EnginePlan& /*plan*/, const EngineOptions& /*options*/) {
  return CheckCudaUsable();
}

}  // namespace logprobd
