// Stands in for the CUDA engine in a build without CUDA.

#include "server/engine/cuda_engine.h"

namespace logprobd {
namespace {

absl::Status NoCuda() {
  return absl::FailedPreconditionError(
      "this build has no CUDA: install the CUDA toolkit 13 or later (nvcc and cuBLAS) and build "
      "with -DLOGPROBD_CUDA=ON, or use the CPU");
}

}  // namespace

absl::StatusOr<EnginePlan> PlanCudaEngine(const HeadInfo& /*head*/,
                                          const EngineOptions& /*options*/,
                                          std::string /*reason*/) {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateCudaEngine(const HeadWeights& /*weights*/,
                                                                const EnginePlan& /*plan*/,
                                                                const EngineOptions& /*options*/) {
  return NoCuda();
}

}  // namespace logprobd
