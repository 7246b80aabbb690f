#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/heartbeat.h"
#include "server/base/scoring_engine.h"
#include "server/engine/rank_team.h"

namespace logprobd {

/// Seconds that a shard spent on each stage of a batch; 0 if a stage does not exist.
struct ShardTimes {
  double h2d = 0;     ///< Copies of hidden rows to the device, including `gather`.
  double gather = 0;  ///< Copies of rows from other shards, including the waits for these shards.
  double kernel = 0;
  double combine = 0;  ///< Includes waits for other shards.
  double d2h = 0;
};

/// The part of a head on one device: CpuShard, CudaShard, or a fake in tests. The shards of a
/// ShardedEngine hold adjacent parts of the vocabulary; the first shard writes the scores.
///
/// Threads: Enqueue is called from one thread at a time. The other functions are called from the
/// engine's finish thread, which may happen while Enqueue runs.
class EngineShard {
 public:
  virtual ~EngineShard() = default;

  /// Sets the heartbeat of the thread that calls Enqueue, which begins and ends work around the
  /// call. A shard whose Enqueue takes long, or waits, beats it as the work moves. Must be called
  /// before the first batch.
  void SetHeartbeat(std::shared_ptr<Heartbeat> heartbeat) { heartbeat_ = std::move(heartbeat); }

  /// Allocates memory from which this shard and its team read hidden rows. See ScoringEngine.
  virtual absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) = 0;

  /// See ScoringEngine. All shards of an engine return the same value.
  virtual bool reads_in_place() const { return false; }
  virtual int64_t row_step(int64_t /*num_rows*/) const { return 1; }

  /// Starts to score `batch` together with the other ranks of `team`, whose Enqueue is called with
  /// the same batch at the same time. `slot` cycles through 0 to kBatchesInFlight - 1. A shard that
  /// cannot score the batch reports this with team.Agree before the others wait for it, and every
  /// rank returns the agreed status. A later failure, even if memory runs out, aborts the team and
  /// is returned as INTERNAL.
  virtual absl::Status Enqueue(ScoreBatch& batch, int32_t slot, RankTeam& team) = 0;

  /// Returns true once all work that Enqueue started in `slot` has ended, or an error if the device
  /// has failed.
  virtual absl::StatusOr<bool> IsDone(int32_t slot) = 0;

  /// Copies the scores of a batch that is done into its spans and returns its times.
  virtual absl::StatusOr<ShardTimes> Collect(ScoreBatch& batch, int32_t slot) = 0;

  /// Returns true if no enqueued work of any slot can still access a batch.
  virtual bool IsIdle() = 0;

 protected:
  Heartbeat& heartbeat() const { return *heartbeat_; }

 private:
  std::shared_ptr<Heartbeat> heartbeat_ = std::make_shared<Heartbeat>();
};

}  // namespace logprobd
