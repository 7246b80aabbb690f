#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/engine/engines.h"

namespace logprobd {

/// The plan of a CudaEngine. FAILED_PRECONDITION when the build has no CUDA, there is no driver or
/// device, or the device is older than compute capability 8.0; each says what to do.
absl::StatusOr<EnginePlan> PlanCudaEngine(const HeadInfo& head, const EngineOptions& options,
                                          std::string reason);

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateCudaEngine(const HeadWeights& weights,
                                                                const EnginePlan& plan,
                                                                const EngineOptions& options);

}  // namespace logprobd
