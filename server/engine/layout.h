#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/engine/engines.h"

// The layout of a head: which part of it is on which device.

namespace logprobd {

/// A half-open range of tiles (kernels/common/tile.h) of the whole vocabulary.
struct TileRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

/// Splits the tiles of `vocab_size` columns into `num_shards` ranges, one per shard. Their sizes
/// differ by at most one tile; the larger ranges come first. Returns INVALID_ARGUMENT if num_shards
/// is less than 1 or greater than the number of tiles; the message names the largest possible
/// number.
absl::StatusOr<std::vector<TileRange>> PartitionTiles(int64_t vocab_size, int32_t num_shards);

/// A GPU before this server allocates anything on it.
struct GpuInfo {
  int32_t ordinal = 0;
  std::string name;
  int32_t major = 0;  ///< Compute capability.
  int32_t minor = 0;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  std::string pci_bus_id = {};  ///< For example "0000:3b:00.0".
  /// Memory that Reserve has subtracted from free_bytes for other heads; negative if it has added
  /// memory.
  int64_t reserved_bytes = 0;
};

/// Subtracts the memory that other heads will take from the free memory of the GPUs, which does not
/// fall below 0. Negative sizes add memory that will be released before the head is loaded.
void Reserve(const MemoryPlan& reserved, std::vector<GpuInfo>& gpus);

/// Memory that a GPU needs for the largest shard of a head.
struct GpuNeeds {
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
};

/// Numbers of replicas and shards, and the device of each shard.
struct Layout {
  int32_t num_replicas = 1;
  int32_t num_shards = 1;
  std::string reason;              ///< Why these numbers were chosen, as text for the log.
  std::vector<ShardPlace> places;  ///< [num_replicas * num_shards]
};

/// Chooses the layout of a head on `gpus`, which are all GPUs of the machine.
///
/// Numbers that `options` does not set are chosen as follows. If a GPU can hold the weight twice
/// (so that a new version can be loaded next to the old one) and the workspace, each GPU gets a
/// replica. Otherwise the head is split into the fewest shards that fit twice, or, if there are no
/// such numbers, into the fewest that fit once; the remaining GPUs hold further replicas. All GPUs
/// that `options` names are used, in that order. If it names none, the GPUs with the most free
/// memory are used, and GPUs that are too few for another replica stay unused.
///
/// Returns FAILED_PRECONDITION if a GPU does not exist, is older than compute capability 8.0 or has
/// too little memory, if there are too few GPUs, or if GPUs differ in model or by more than 1 % in
/// memory. Returns INVALID_ARGUMENT if there are more shards than tiles or more than 16, if a GPU
/// is named twice, or if named GPUs would stay unused. Each message says what to change.
absl::StatusOr<Layout> PlanGpuLayout(const HeadInfo& head, const EngineOptions& options,
                                     absl::Span<const GpuInfo> gpus,
                                     const std::function<GpuNeeds(int32_t num_shards)>& needs_of);

/// Returns the layout of a CPU engine: one replica of one shard unless `options` sets other
/// numbers. Returns INVALID_ARGUMENT if there are more shards than tiles, or more than 256 shards
/// in total.
absl::StatusOr<Layout> PlanCpuLayout(const HeadInfo& head, const EngineOptions& options);

}  // namespace logprobd
