#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/base/client_memory.h"
#include "server/engine/engines.h"
#include "server/metrics/metrics.h"

namespace logprobd {

// What clients on this host may share with the engines of a plan. What is returned must outlive
// every payload and be destroyed before CUDA is.

/// Pins memory for the plan's GPUs; on a CPU nothing needs to be pinned.
std::unique_ptr<HostPinning> CreateHostPinning(const EnginePlan& plan);

/// Maps memory of other processes on the plan's GPUs and those that they reach. FAILED_PRECONDITION
/// on a CPU, RESOURCE_EXHAUSTED when no thread can be had. `metrics` must outlive it.
absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateDeviceMemory(const EnginePlan& plan,
                                                                 Metrics& metrics);

}  // namespace logprobd
