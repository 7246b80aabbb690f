#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/engines.h"

namespace logprobd {

/// The plan of a CPU engine; see PlanEngine. Shards on a CPU share its threads: of use to test what
/// several GPUs do, and where memory lies apart.
absl::StatusOr<EnginePlan> PlanCpuEngine(const HeadInfo& head, const EngineOptions& options,
                                         std::string reason);

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateCpuEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options);

}  // namespace logprobd
