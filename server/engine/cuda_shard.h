#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "server/engine/cuda_resources.h"
#include "server/engine/cuda_scorer.h"
#include "server/engine/cuda_slot.h"
#include "server/engine/engine_shard.h"
#include "server/engine/fault_points.h"
#include "server/engine/load_meter.h"
#include "server/engine/workspace_plan.h"

namespace logprobd {

/// The shard of a head on one GPU.
///
/// It has three streams: copies in, kernels, copies out. Every shard cuts a batch into the same
/// blocks of rows. The hidden rows of a block pass through one of two device buffers, so that their
/// copy overlaps the kernels of the previous block, also of another batch. Large blocks cross the
/// bus once in total: each GPU copies its part from the host and the other parts from its peers.
/// Small blocks go from the host to every GPU. Rows of clients in GPU memory are copied to the
/// buffers as well, since kernels read only these. Copy engines copy between GPUs, because the
/// kernels leave no multiprocessor free.
class CudaShard final : public EngineShard {
 public:
  struct Options {
    int32_t rank = 0;
    int gpu = 0;
    WorkspacePlan plan;
    /// Host side of the slot of each batch in flight, shared by the shards of an engine.
    std::vector<std::shared_ptr<PinnedBuffer>> host_slots;
    FaultPoints faults;
  };

  /// Reads the shard's rows of `weights`. Errors are those of LoadCudaHead; all are reported to
  /// `meter`.
  static absl::StatusOr<std::unique_ptr<CudaShard>> Create(const HeadWeights& weights,
                                                           Options options, LoadMeter& meter);
  ~CudaShard() override;

  /// Scores a few batches alone, so that every kernel is loaded. Call it before the first batch,
  /// for one shard of an engine after the other, since they share the host sides of the slots.
  absl::Status WarmUp(const HeadInfo& head);

  /// Sets the shards of the engine by rank, including this one; all GPUs must be reachable from
  /// this one. Call it before the first batch. The shards must live as long as this one is used.
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
    bool is_spread = false;  ///< Each shard copies a part of the rows from the host.
    bool is_first = false;   ///< This is the first block of its pass.
    CudaSlot::BlockEvents* events = nullptr;
  };

  explicit CudaShard(Options options) : options_(std::move(options)) {}

  absl::Status Initialize(const HeadWeights& weights, LoadMeter& meter);
  absl::Status WarmUpRows(const HeadInfo& head, Dtype dtype, int64_t num_rows, int32_t top_k);

  absl::Status EnqueuePasses(ScoreBatch& batch, Job& job, RankTeam& team);
  absl::Status EnqueuePass(const ScoreBatch& batch, Job& job, RankTeam& team);
  absl::Status EnqueueOwnRows(const ScoreBatch& batch, const RowBlock& block);
  absl::Status EnqueueHidden(const ScoreBatch& batch, const RowBlock& block, int64_t begin,
                             int64_t end);
  absl::Status EnqueueRun(const HiddenRun& run, size_t row_bytes, std::byte* out, size_t pitch);
  absl::Status EnqueuePeerRows(const ScoreBatch& batch, const RowBlock& block);
  absl::Status EnqueueScores(const ScoreBatch& batch, CudaSlot& slot, const RowBlock& block,
                             RankTeam& team);
  /// Waits for the end of a pass before the next one. Returns early with an error if the team
  /// fails.
  absl::Status AwaitPass(CudaSlot& slot, RankTeam& team) const;
  absl::Status EnqueueEnd(CudaSlot& slot);
  void AddTimes(Job& job) const;

  int64_t num_shards() const { return options_.plan.num_shards; }
  /// First row of a rank's part of a block of `count` rows.
  int64_t PartBegin(int64_t count, int64_t rank) const { return count * rank / num_shards(); }

  const Options options_;
  std::vector<const CudaShard*> peers_;
  std::unique_ptr<CudaScorer> scorer_;
  CudaStream copy_in_;
  CudaStream compute_;
  CudaStream copy_out_;
  std::array<HiddenBuffer, ScoringEngine::kBatchesInFlight> hidden_;
  std::vector<Job> jobs_;
  size_t next_hidden_ = 0;  ///< Buffer of the next block; the same on every shard.
};

}  // namespace logprobd
