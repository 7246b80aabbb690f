#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/engine/engines.h"

namespace logprobd {

/// A GPU before anything is allocated on it.
struct GpuInfo {
  int32_t ordinal = 0;
  std::string name;
  int32_t major = 0;  ///< Compute capability.
  int32_t minor = 0;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  std::string pci_bus_id = {};  ///< "0000:3b:00.0"
  /// For other heads, no longer in `free_bytes`; negative: given back before, already in them.
  int64_t reserved_bytes = 0;
};

/// Takes what other heads will need off the GPUs' free memory; never below 0. Negative: adds what
/// is given back.
void Reserve(const MemoryPlan& reserved, std::vector<GpuInfo>& gpus);

/// Memory of a GPU that holds one of `num_shards` shards, the largest.
struct GpuNeeds {
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
};

/// Replicas x shards.
struct Layout {
  int32_t num_replicas = 1;
  int32_t num_shards = 1;
  std::string reason;              ///< Why these numbers, with what they were decided by.
  std::vector<ShardPlace> places;  ///< [num_replicas * num_shards]
};

/// Decides what lies on which of `gpus`, all that the machine has. Numbers left open in `options`
/// are chosen: replicas where a GPU holds the whole head comfortably (its weight twice, so that a
/// new version can lie beside the old, and the workspace), else the fewest shards that do, else the
/// fewest that fit at all; the rest of the GPUs become replicas. GPUs that `options` names are all
/// used, in that order; of others those with the most free memory, so that one which another
/// process fills is left out, as is a rest that is less than a replica.
///
/// FAILED_PRECONDITION, each saying what to change: a GPU that is not there, too few, older than
/// compute capability 8.0, of different models or memory (1%), or without room. INVALID_ARGUMENT:
/// more shards than tiles or than 16, a GPU named twice, or named GPUs that would be left over.
absl::StatusOr<Layout> PlanGpuLayout(const HeadInfo& head, const EngineOptions& options,
                                     absl::Span<const GpuInfo> gpus,
                                     const std::function<GpuNeeds(int32_t num_shards)>& needs_of);

/// The same on a CPU, where shards and replicas share the threads: one of each unless asked.
/// INVALID_ARGUMENT: more shards than tiles, or more than 256 places.
absl::StatusOr<Layout> PlanCpuLayout(const HeadInfo& head, const EngineOptions& options);

}  // namespace logprobd
