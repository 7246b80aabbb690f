#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/engines.h"

namespace logprobd {

/// Number of cores that this process may use, at least 1. It is the smaller of its CPU affinity and
/// the CPU quota of its control group (version 2), rounded up.
int32_t UsableCpuCount();

/// Plans a CPU engine; see PlanEngine. `why_cpu` is the first clause of the plan's reason, for
/// example "no NVIDIA GPU is visible". The shards and replicas of a CPU engine share its threads.
/// More than one is useful for tests of the behaviour of several GPUs and on machines with several
/// NUMA nodes.
absl::StatusOr<EnginePlan> PlanCpuEngine(const HeadInfo& head, const EngineOptions& options,
                                         absl::string_view why_cpu);

/// Reads the weight and creates the engines of a plan of PlanCpuEngine, one per replica.
absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateCpuEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options);

}  // namespace logprobd
