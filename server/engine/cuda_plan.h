#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/chunked/chunk_plan.h"
#include "server/base/head_info.h"
#include "server/engine/engines.h"
#include "server/engine/layout.h"
#include "server/engine/vocab_partition.h"

namespace logprobd {

/// The sizes of a shard with `tiles` on GPU `gpu`, which must exist, of a head in `num_shards`.
kernels::ChunkPlan ChunkPlanOf(const HeadInfo& head, const EngineOptions& options, int32_t gpu,
                               int32_t num_shards, const TileRange& tiles);

/// GPU ordinals of a planned engine's replica, by rank.
std::vector<int32_t> GpusOf(const EnginePlan& plan, int32_t replica);

/// Memory of one replica: its GPUs', and the host's.
MemoryPlan ReplicaMemory(const HeadInfo& head, const EngineOptions& options, Exchange exchange,
                         absl::Span<const int32_t> gpus, absl::Span<const TileRange> tiles);

}  // namespace logprobd
