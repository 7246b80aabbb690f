#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/scoring_engine.h"
#include "server/engine/rank_team.h"

namespace logprobd {

/// Seconds that a shard's part of a batch took; 0 where a stage does not exist.
struct ShardTimes {
  double h2d = 0;     ///< Until the shard has all rows.
  double gather = 0;  ///< Of which those of other shards' parts, waiting for them included.
  double kernel = 0;
  double combine = 0;  ///< Waiting for other shards included.
  double d2h = 0;
};

/// One device's part in the work of a ShardedEngine: CpuShard, CudaShard, fakes in tests. Shards of
/// an engine hold adjacent parts of the vocabulary; the first writes the scores.
///
/// Threads: Enqueue from one thread at a time, the rest from the engine's finish thread, also while
/// Enqueue runs.
class EngineShard {
 public:
  virtual ~EngineShard() = default;

  /// Memory from which this shard and its team read hidden rows; see ScoringEngine.
  virtual absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) = 0;

  /// See ScoringEngine; the same for all shards of an engine.
  virtual bool reads_in_place() const { return false; }
  virtual int64_t row_step(int64_t /*num_rows*/) const { return 1; }

  /// Begins to score `batch`, together with the other ranks of `team`, which are called with the
  /// same batch at the same time; `slot` is 0 to kBatchesInFlight - 1, in turn. What a shard cannot
  /// do it tells by team.Agree before the others wait for it, and every rank returns what was
  /// agreed; a failure after that aborts the team and is INTERNAL, one of memory too.
  virtual absl::Status Enqueue(ScoreBatch& batch, int32_t slot, RankTeam& team) = 0;

  /// Whether all that Enqueue began in `slot` has ended. An error is the device's.
  virtual absl::StatusOr<bool> IsDone(int32_t slot) = 0;

  /// Once the batch is done: its scores are brought into place.
  virtual absl::StatusOr<ShardTimes> Collect(ScoreBatch& batch, int32_t slot) = 0;

  /// Whether nothing that was enqueued, in any slot, can touch a batch any more.
  virtual bool IsIdle() = 0;
};

}  // namespace logprobd
