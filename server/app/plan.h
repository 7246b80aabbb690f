#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/app/server_options.h"
#include "server/base/head_info.h"
#include "server/batching/batcher.h"
#include "server/engine/engines.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// What a server would serve and what it takes, known before any weight is read.
struct ServingPlan {
  HeadInfo head;  ///< Complete: engine, reason and limits too.
  EnginePlan engine;
  MemoryPlan memory;  ///< Weights, workspace, staging and receive quota.
  std::vector<std::string> warnings;
};

/// The parts' own options, from the server's.
ModelFolderOptions ModelOptionsOf(const ServerOptions& options);
EngineOptions EngineOptionsOf(const ServerOptions& options);
Batcher::Options BatcherOptionsOf(const ServerOptions& options);

/// Longest time of a batch on the device that was chosen; how long a CPU takes is known to nobody.
absl::Duration BatchTimeMaxOf(const ServerOptions& options, Device device);

/// The limits that requests are told and held to. Never more rows or message bytes than one
/// client's share of the queue admits; answers count in that share too, so that what is within the
/// limits can be served unless its lists (top_k, candidates) are out of all proportion to the
/// queue.
RequestLimits LimitsOf(const ServerOptions& options);

ServingPlan MakeServingPlan(const ServerOptions& options, const HeadInfo& head,
                            const EnginePlan& engine, const std::vector<std::string>& warnings);

/// CUDA ordinals of the GPUs in a layout, each once, in its order.
std::vector<int> GpusOf(const std::vector<ShardPlace>& layout);

/// Bytes of all entries at `place`.
int64_t TotalBytes(const MemoryPlan& plan, absl::string_view place);

/// The text of --dry-run and of the status page, a fact a line.
std::string PlanText(const ServingPlan& plan);

}  // namespace logprobd
