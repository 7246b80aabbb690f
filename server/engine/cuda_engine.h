#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engines.h"

namespace logprobd {

/// Whether this build and machine can score on a GPU at all. FAILED_PRECONDITION when the build has
/// no CUDA, there is no driver or device, or none of compute capability 8.0; each says what to do.
absl::Status CheckCudaUsable();

/// The plan of a CUDA engine; see PlanEngine. Errors of CheckCudaUsable and PlanGpuLayout, and
/// FAILED_PRECONDITION for what the build or the limits do not allow.
absl::StatusOr<EnginePlan> PlanCudaEngine(const HeadInfo& head, const EngineOptions& options,
                                          std::string reason);

/// One engine a replica; every GPU reads its own rows, all at once.
absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateCudaEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options);

}  // namespace logprobd
