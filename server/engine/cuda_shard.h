#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "server/engine/cuda_resources.h"
#include "server/engine/cuda_scorer.h"
#include "server/engine/cuda_slot.h"
#include "server/engine/engine_resources.h"
#include "server/engine/engine_shard.h"
#include "server/engine/load_meter.h"
#include "server/engine/workspace_plan.h"

namespace logprobd {

/// The shard of a head on one GPU.
///
/// It has three streams: one for copies in, one for kernels and one for copies out. Every shard
/// splits a batch into the same blocks of rows. The hidden rows of a block are copied to one of two
/// device buffers, so that their copy overlaps the kernels of the previous block, which may belong
/// to another batch. Large blocks cross the bus from the host once in total: each GPU copies its
/// part from the host and the other parts from its peers. Small blocks are copied from the host to
/// every GPU. Rows that clients have in GPU memory are also copied to the buffers, because kernels
/// read only these. Copy engines copy between GPUs, because the kernels occupy all multiprocessors.
class CudaShard final : public EngineShard {
 public:
  struct Options {
    int32_t rank = 0;
    int gpu = 0;
    WorkspacePlan plan;
    /// Host sides of the slots, one per batch in flight, shared by the shards of an engine.
    std::vector<std::shared_ptr<PinnedBuffer>> host_slots;
    EngineResources* resources = &EngineResources::Real();
  };

  /// Creates a shard and reads its rows of `weights`. Returns the errors of LoadCudaHead and
  /// reports all errors to `meter`.
  static absl::StatusOr<std::unique_ptr<CudaShard>> Create(const HeadWeights& weights,
                                                           Options options, LoadMeter& meter);
  ~CudaShard() override;

  /// Scores a few batches without the other shards, so that every kernel is loaded. Call it before
  /// the first batch, and for one shard of an engine at a time, since the shards share the host
  /// sides of the slots.
  absl::Status WarmUp(const HeadInfo& head);

  /// Sets the shards of the engine by rank, including this one. Call it before the first batch.
  /// This shard's GPU must be able to access all other GPUs, and the shards must stay valid as long
  /// as this one is used.
  void SetPeers(std::vector<const CudaShard*> peers) { peers_ = std::move(peers); }

  int gpu() const { return options_.gpu; }
  const WorkspacePlan& plan() const { return options_.plan; }
  const CudaScorer& scorer() const { return *scorer_; }

  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override;
  bool reads_in_place() const override { return true; }
  int64_t row_step(int64_t num_rows) const override { return scorer_->RowStep(num_rows); }
  absl::Status Enqueue(ScoreBatch& batch, int32_t slot, RankTeam& team) override;
  absl::StatusOr<bool> IsDone(int32_t slot) override;
  absl::StatusOr<ShardTimes> Collect(ScoreBatch& batch, int32_t slot) override;
  bool IsIdle() override;

 private:
  struct HiddenBuffer {
    DeviceBuffer memory;
    CudaEvent own;     ///< This shard's part of the rows is copied.
    CudaEvent filled;  ///< The parts of the other shards are copied.
    CudaEvent read;    ///< The kernels have read the rows.
  };

  /// A batch in flight and the times of its passes so far.
  struct Job {
    CudaSlot slot;
    int64_t num_blocks = 0;  ///< Blocks of the last pass.
    ShardTimes times = {};
  };

  /// Rows [begin, begin + count) of a batch, in hidden buffer `buffer`.
  struct RowBlock {
    int64_t begin = 0;
    int64_t count = 0;
    size_t buffer = 0;
    bool is_spread = false;  ///< True if each shard copies only its part of the rows from the host.
    bool is_first = false;   ///< True for the first block of a pass.
    CudaSlot::BlockEvents* events = nullptr;
  };

  explicit CudaShard(Options options) : options_(std::move(options)) {}

  absl::Status Initialize(const HeadWeights& weights, LoadMeter& meter);
  absl::Status WarmUpRows(const HeadInfo& head, Dtype dtype, int64_t num_rows, int32_t top_k);

  absl::Status EnqueuePasses(ScoreBatch& batch, Job& job, RankTeam& team);
  absl::Status EnqueuePass(const ScoreBatch& batch, Job& job, RankTeam& team);
  /// Enqueues the copy of this shard's part of a block, or of the whole block, from the memory that
  /// holds the rows.
  absl::Status EnqueueOwnRows(const ScoreBatch& batch, const RowBlock& block);
  /// Enqueues the copy of rows [begin, end) of the block.
  absl::Status EnqueueHidden(const ScoreBatch& batch, const RowBlock& block, int64_t begin,
                             int64_t end);
  absl::Status EnqueueRun(const HiddenRun& run, size_t row_bytes, std::byte* out, size_t pitch);
  /// Enqueues the copies of the other shards' parts of a block from their buffers.
  absl::Status EnqueuePeerRows(const ScoreBatch& batch, const RowBlock& block);
  absl::Status EnqueueScores(const ScoreBatch& batch, CudaSlot& slot, const RowBlock& block,
                             RankTeam& team);
  /// Waits until a pass has ended, before the next one starts. Returns early with an error if the
  /// team fails.
  absl::Status AwaitPass(CudaSlot& slot, RankTeam& team) const;
  /// Records the slot's last event behind all work that was enqueued so far.
  absl::Status EnqueueEnd(CudaSlot& slot);
  /// Adds the times of the last pass.
  void AddTimes(Job& job) const;

  int64_t num_shards() const { return options_.plan.num_shards; }
  /// Returns the first row of a rank's part of a block of `count` rows.
  int64_t PartBegin(int64_t count, int64_t rank) const { return count * rank / num_shards(); }

  const Options options_;
  std::vector<const CudaShard*> peers_;
  std::unique_ptr<CudaScorer> scorer_;
  CudaStream copy_in_;
  CudaStream compute_;
  CudaStream copy_out_;
  std::array<HiddenBuffer, ScoringEngine::kBatchesInFlight> hidden_;
  std::vector<Job> jobs_;
  size_t next_hidden_ = 0;  ///< Index of the next block's buffer; the same on every shard.
};

}  // namespace logprobd
