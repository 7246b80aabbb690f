// Replaces the parts that this build does not contain: the CUDA engine and NCCL, or only NCCL. Each
// function that needs such a part returns an error that says what to install.

#include "server/engine/nccl_collective.h"

#ifndef LOGPROBD_HAVE_CUDA
#include "server/engine/cuda_client_memory.h"
#include "server/engine/cuda_engine.h"
#endif

namespace logprobd {

#ifndef LOGPROBD_HAVE_CUDA

std::string WhyNoCuda() { return "this build has no CUDA support"; }

absl::Status CheckCudaUsable() {
  return absl::FailedPreconditionError(
      "this build has no CUDA support: install the CUDA toolkit 13 or later (nvcc and cuBLAS) and "
      "build with -DLOGPROBD_CUDA=ON, or use --device cpu");
}

absl::StatusOr<EnginePlan> PlanCudaEngine(const HeadInfo& /*head*/,
                                          const EngineOptions& /*options*/,
                                          absl::string_view /*why_cuda*/) {
  return CheckCudaUsable();
}

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateCudaEngines(
    const HeadWeights& /*weights*/, const EnginePlan& /*plan*/, const EngineOptions& /*options*/) {
  return CheckCudaUsable();
}

std::unique_ptr<HostPinning> CreateCudaHostPinning(int32_t /*gpu*/) {
  return std::make_unique<NoPinning>();
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateCudaIpcMemory(CudaIpcOptions /*options*/) {
  return CheckCudaUsable();
}

#endif

absl::Status CheckNcclUsable() {
  return absl::FailedPreconditionError(
      "this build has no NCCL support: install libnccl-dev and build again, or use GPUs that can "
      "reach each other's memory");
}

absl::StatusOr<std::unique_ptr<Collective>> CreateNcclCollective(
    absl::Span<const int32_t> /*gpus*/) {
  return CheckNcclUsable();
}

}  // namespace logprobd
