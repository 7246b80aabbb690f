#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/engines.h"

namespace logprobd {

/// Returns the reason why this build or machine cannot score on a GPU, as a clause without advice,
/// for example "no NVIDIA GPU is visible". Returns an empty string if it can.
std::string WhyNoCuda();

/// Returns the same reason as an error with advice: FAILED_PRECONDITION if the build has no CUDA
/// support, or if the machine has no driver, no GPU, or no GPU of compute capability 8.0 or later.
absl::Status CheckCudaUsable();

/// Plans a CUDA engine; see PlanEngine. `why_cuda` is the first clause of the plan's reason.
/// Returns the errors of CheckCudaUsable and PlanGpuLayout, and FAILED_PRECONDITION if the build or
/// the limits do not allow the head or the options.
absl::StatusOr<EnginePlan> PlanCudaEngine(const HeadInfo& head, const EngineOptions& options,
                                          absl::string_view why_cuda);

/// Creates the engines of a plan of PlanCudaEngine, one per replica. All GPUs read their rows at
/// the same time.
absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateCudaEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options);

}  // namespace logprobd
