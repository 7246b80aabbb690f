#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "kernels/cpu/row_scorer.h"
#include "kernels/cpu/thread_pool.h"
#include "server/engine/cpu_head.h"
#include "server/engine/engine_resources.h"
#include "server/engine/engine_shard.h"

namespace logprobd {

/// A shard on the CPU, which has its own threads. Enqueue scores the batch before it returns.
class CpuShard final : public EngineShard {
 public:
  /// Throws std::bad_alloc and std::system_error, as RowScorer does.
  CpuShard(int32_t rank, CpuHead head, const kernels::RowScorer::Options& options,
           EngineResources& resources)
      : rank_(rank),
        head_(std::move(head)),
        resources_(resources),
        threads_(options.num_threads, *this),
        scorer_(head_.view(), options, threads_) {}

  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override;
  absl::Status Enqueue(ScoreBatch& batch, int32_t slot, RankTeam& team) override;
  absl::StatusOr<bool> IsDone(int32_t /*slot*/) override { return true; }  // Enqueue has scored it.
  absl::StatusOr<ShardTimes> Collect(ScoreBatch& batch, int32_t slot) override;
  bool IsIdle() override { return !is_scoring_.load(); }

 private:
  /// The threads of the scorer. Each unit of a loop is a beat, since a batch may take minutes.
  class ScorerThreads final : public kernels::LoopThreads {
   public:
    ScorerThreads(int32_t num_threads, const CpuShard& shard) : pool_(num_threads), shard_(shard) {}
    int32_t num_threads() const override { return pool_.num_threads(); }
    void ForEach(int64_t num_units,
                 const std::function<void(int64_t unit, int32_t worker)>& body) override;

   private:
    kernels::ThreadPool pool_;
    const CpuShard& shard_;
  };

  absl::Status Score(ScoreBatch& batch, RankTeam& team);
  /// Scores the rows as one of several shards. For each step of rows, the shards reduce arrays
  /// twice.
  absl::Status ScoreInShards(const kernels::ScoreRowsParams& params, Collective& collective);

  const int32_t rank_;
  const CpuHead head_;
  EngineResources& resources_;
  ScorerThreads threads_;
  kernels::RowScorer scorer_;
  std::atomic<bool> is_scoring_ = false;
  double seconds_[ScoringEngine::kBatchesInFlight] = {};
};

}  // namespace logprobd
