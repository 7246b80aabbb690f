#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/scoring_engine.h"
#include "server/engine/collective.h"
#include "server/engine/engine_shard.h"
#include "server/engine/engines.h"
#include "server/engine/layout.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// Options of the engine of one replica of a head, with a shard on each of its devices. All shards
/// score every batch together.
///
///   Start -> submit thread: Enqueue of every shard, in parallel -> finish thread: waits until all
///   are done, collects scores and times, calls `done`
///
/// Failures: if all shards agree on a failure before a device waits for another one (out of memory,
/// or a batch that does not fit), only that batch fails. After any other failure, or if a batch
/// takes longer than `batch_time_max`, the batches in flight fail and the engine stays unhealthy.
/// Batches then end with INTERNAL if a device or its exchange has failed, and with UNAVAILABLE
/// after a timeout; later batches end with UNAVAILABLE.
///
/// A call to a device may never return, so no thread of the engine can be relied on to notice. Each
/// rank thread has a heartbeat for the watchdog, with which it is at work while it enqueues a
/// batch, and so has the finish thread, which is at work from the start of a batch to its end.
struct ShardedEngineOptions {
  HeadInfo info;
  MemoryPlan memory;
  int64_t batch_rows_max = 0;
  int32_t top_k_max = 0;
  /// Longest time from the Start of a batch to its end, including the wait for one other batch.
  absl::Duration batch_time_max = absl::InfiniteDuration();
  /// Longest time, after a failure, for which the engine waits until the shards have ended their
  /// work, before it calls `done` for the batches. A device that hangs never ends its work.
  absl::Duration rest_time_max = absl::InfiniteDuration();
  /// Time for which the submit thread polls for the next batch before it sleeps; zero if the shards
  /// score on the same cores.
  absl::Duration busy_poll = absl::ZeroDuration();
  std::vector<TileRange> tiles;  ///< One range per shard.
  std::vector<int32_t> gpus;     ///< CUDA ordinal of each shard, for the metrics; empty on a CPU.
  int32_t replica = 0;
  const Clock* clock = &Clock::Steady();
  Metrics* metrics = nullptr;        ///< May be null.
  Heartbeats* heartbeats = nullptr;  ///< Table for the heartbeats of the threads; may be null.
};

/// Returns the options of the engine of replica `replica` that follow from a plan and from
/// `options`. The caller adds memory, tiles and GPUs.
ShardedEngineOptions ReplicaOptions(const HeadInfo& info, const EnginePlan& plan,
                                    const EngineOptions& options, int32_t replica);

/// Creates the engine of one replica. `collective` may be null for one shard. Returns
/// RESOURCE_EXHAUSTED if threads cannot be started.
absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateShardedEngine(
    ShardedEngineOptions options, std::vector<std::unique_ptr<EngineShard>> shards,
    std::unique_ptr<Collective> collective);

}  // namespace logprobd
