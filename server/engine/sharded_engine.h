#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/scoring_engine.h"
#include "server/engine/collective.h"
#include "server/engine/engine_shard.h"
#include "server/engine/engines.h"
#include "server/engine/vocab_partition.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// One replica of a head: a shard on each of its devices, which score every batch together.
///
///   Start -> submit thread: every shard's Enqueue, in parallel -> finish thread: watches until all
///   are done, brings the scores into place, `done`
///
/// Failures: what all shards agree on before a device waits for another (no memory, a batch that
/// does not fit) fails that batch alone. Anything else, and a batch that takes longer than
/// `batch_time_max`, fails the batches in flight and makes the engine unhealthy for good: INTERNAL
/// for a device or its means of joining, UNAVAILABLE for time and for what comes later.
struct ShardedEngineOptions {
  HeadInfo info;
  MemoryPlan memory;
  int64_t batch_rows_max = 0;
  int32_t top_k_max = 0;
  /// Longest time from Start of a batch, which may wait for one other, to its end.
  absl::Duration batch_time_max = absl::InfiniteDuration();
  /// How long shards that were told to stop are waited for before their batch is answered: a device
  /// that hangs never comes to rest.
  absl::Duration rest_time_max = absl::InfiniteDuration();
  /// How long the submit thread looks for the next batch before it sleeps; zero where the shards
  /// score on the same cores.
  absl::Duration busy_poll = absl::ZeroDuration();
  std::vector<TileRange> tiles;  ///< A shard each.
  std::vector<int32_t> gpus;     ///< Ordinals for the metrics, a shard each; empty on a CPU.
  int32_t replica = 0;
  const Clock* clock = &Clock::Steady();
  Metrics* metrics = nullptr;  ///< May be null.
};

/// What the engine of replica `replica` of a plan takes over from it and from `options`; memory,
/// tiles and GPUs are the device's to add.
ShardedEngineOptions ReplicaOptions(const HeadInfo& info, const EnginePlan& plan,
                                    const EngineOptions& options, int32_t replica);

/// `collective` joins what the shards know; null for one shard. RESOURCE_EXHAUSTED when threads
/// cannot be had.
absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateShardedEngine(
    ShardedEngineOptions options, std::vector<std::unique_ptr<EngineShard>> shards,
    std::unique_ptr<Collective> collective);

}  // namespace logprobd
