#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/engine/engines.h"

namespace logprobd {

/// The plan of a CpuEngine; see PlanEngine.
EnginePlan PlanCpuEngine(const HeadInfo& head, const EngineOptions& options, std::string reason);

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateCpuEngine(const HeadWeights& weights,
                                                               const EnginePlan& plan,
                                                               const EngineOptions& options);

}  // namespace logprobd
