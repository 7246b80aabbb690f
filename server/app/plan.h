#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/app/server_options.h"
#include "server/base/head_info.h"
#include "server/base/host.h"
#include "server/batching/batcher.h"
#include "server/engine/engines.h"
#include "server/weights/allowed_roots.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// What a server would serve of one head and what that takes, known before any weight is read.
struct ServingPlan {
  HeadInfo head;  ///< Complete: engine, reason and limits too.
  EnginePlan engine;
  MemoryPlan memory;  ///< Weights, workspace and staging.
  std::vector<std::string> warnings;
};

/// All heads of a server, and what they share.
struct ServerPlan {
  std::vector<ServingPlan> heads;  ///< In the order in which they are planned and loaded.
  int64_t receive_bytes = 0;       ///< Of the host, at most, for messages of all heads.
  int64_t shared_bytes = 0;        ///< Of the host, at most, for regions shared with clients.
  /// What is there for them: an entry for each place that is known.
  MemoryPlan there;

  /// Of all heads, `receive_bytes` and `shared_bytes`; an entry for each place and kind.
  MemoryPlan memory() const;
};

// The parts' own options. `options` are those of one head, as HeadOptions gives them.

ModelFolderOptions ModelOptionsOf(const ServerOptions& options);
EngineOptions EngineOptionsOf(const ServerOptions& options);
Batcher::Options BatcherOptionsOf(const ServerOptions& options);

/// Where new weights may be loaded from; null: nowhere. By default the folder that holds the
/// model's, or the model's own where that would be the whole machine. NOT_FOUND or INVALID_ARGUMENT
/// for a --weights-root that is no folder.
absl::StatusOr<std::shared_ptr<const AllowedRoots>> WeightsRootsOf(const ServerOptions& options);

/// Staging buffers that each replica has from the start: for two versions where others may be
/// loaded, since memory that is page-locked beside a live one stalls it.
int NumStagingBuffers(const ServerOptions& options);

/// Longest time of a batch on the device that was chosen; how long a CPU takes is known to nobody.
absl::Duration BatchTimeMaxOf(const ServerOptions& options, Device device);

/// The limits that requests are told and held to. Never more rows or message bytes than one
/// client's share of the queue admits; answers count in that share too, so that what is within the
/// limits can be served unless its lists (top_k, candidates) are out of all proportion to the
/// queue.
RequestLimits LimitsOf(const ServerOptions& options);

ServingPlan MakeServingPlan(const ServerOptions& options, const HeadInfo& head,
                            const EnginePlan& engine, const std::vector<std::string>& warnings);

/// `host`: what is there; the GPUs' memory stands in the engines' plans. FAILED_PRECONDITION with
/// the numbers when the host can never have what the heads reserve; a warning of the last head when
/// it has not now.
absl::StatusOr<ServerPlan> MakeServerPlan(const ServerOptions& options,
                                          std::vector<ServingPlan> heads,
                                          const HostMemorySize& host);

/// Where the machine's GPUs sit ("0000:3b:00.0"), by CUDA ordinal.
std::map<int, std::string> PciBusIdsOf(const ServerPlan& plan);

/// Of the host, at most, for regions that clients share.
int64_t SharedMemoryBytesMax(const ServerOptions& options);

/// CUDA ordinals of the GPUs in all layouts, each once, in their order.
std::vector<int32_t> GpusOf(const ServerPlan& plan);

/// Adds `use` to the entry of its place, kind and pinning, or as a new one.
void AddMemory(MemoryPlan& sum, const MemoryUse& use);

/// Bytes of all entries at `place`.
int64_t TotalBytes(const MemoryPlan& plan, absl::string_view place);

/// The text of --dry-run and of the status page, a fact a line: a block for each head, and one with
/// the sums where there are several.
std::string PlanText(const ServerPlan& plan);

}  // namespace logprobd
