#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/chunked/chunk_plan.h"
#include "server/engine/cuda_memory.h"
#include "server/engine/cuda_scorer.h"
#include "server/engine/cuda_slot.h"
#include "server/engine/engine_shard.h"
#include "server/engine/fault_points.h"
#include "server/engine/load_meter.h"

namespace logprobd {

/// The part of a head that lies on one GPU.
///
/// Streams: copies in, kernels, copies out. A batch is cut into blocks of rows, on every shard
/// alike. A block's hidden rows pass through a ring of two device buffers, so that their copy runs
/// beside the kernels of the block before, of the same batch or not. Many rows cross the bus once
/// in all: each GPU takes its part and copies the others' parts from their buffers; few rows go
/// straight to every GPU. Rows that lie on a GPU already, a client's, are copied from there first:
/// kernels read the buffers alone. Copies between GPUs are made by copy engines, since the kernels
/// leave no multiprocessor free.
class CudaShard final : public EngineShard {
 public:
  struct Options {
    int32_t rank = 0;
    int gpu = 0;
    kernels::ChunkPlan plan;
    /// A slot's host side for each batch in flight, shared by the shards of an engine.
    std::vector<std::shared_ptr<PinnedBuffer>> host_slots;
    FaultPoints faults;
  };

  /// Reads the shard's rows of `weights`. Errors are those of LoadCudaHead; whichever it is,
  /// `meter` is told.
  static absl::StatusOr<std::unique_ptr<CudaShard>> Create(const HeadWeights& weights,
                                                           Options options, LoadMeter& meter);
  ~CudaShard() override;

  /// Scores a few batches alone, so that every kernel is loaded. Before the first batch, and one
  /// shard of an engine after the other: they share the slots' host sides.
  absl::Status WarmUp(const HeadInfo& head);

  /// The shards of the engine by rank, this one too, all reachable from here. Before the first
  /// batch; they live as long as this one is used.
  void SetPeers(std::vector<const CudaShard*> peers) { peers_ = std::move(peers); }

  int gpu() const { return options_.gpu; }
  const kernels::ChunkPlan& plan() const { return options_.plan; }
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
    CudaEvent own;     ///< This shard's part of the rows has come from the host.
    CudaEvent filled;  ///< The other parts have come from the other shards.
    CudaEvent read;    ///< The kernels have read the rows.
  };

  /// A batch that is being scored, with what its passes so far took.
  struct Job {
    CudaSlot slot;
    int64_t num_blocks = 0;  ///< Of the last pass.
    ShardTimes times = {};
  };

  /// Rows [begin, begin + count) of a batch, in hidden buffer `buffer`.
  struct RowBlock {
    int64_t begin = 0;
    int64_t count = 0;
    size_t buffer = 0;
    bool is_spread = false;  ///< Each shard brings a part.
    bool is_first = false;   ///< Of its pass.
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
  absl::Status EnqueueOthersRows(const ScoreBatch& batch, const RowBlock& block);
  absl::Status EnqueueScores(const ScoreBatch& batch, CudaSlot& slot, const RowBlock& block,
                             RankTeam& team);
  /// Waits for a pass that another follows, as long as the team is whole.
  absl::Status AwaitPass(CudaSlot& slot, RankTeam& team) const;
  absl::Status EnqueueEnd(CudaSlot& slot);
  void AddTimes(Job& job) const;

  int64_t num_shards() const { return options_.plan.num_shards; }
  /// First row of a rank's part of a block.
  int64_t PartBegin(int64_t count, int64_t rank) const { return count * rank / num_shards(); }

  const Options options_;
  std::vector<const CudaShard*> peers_;
  std::unique_ptr<CudaScorer> scorer_;
  CudaStream copy_in_;
  CudaStream compute_;
  CudaStream copy_out_;
  std::array<HiddenBuffer, kernels::kChunkSlots> hidden_;
  std::vector<Job> jobs_;
  size_t next_hidden_ = 0;  ///< The same on every shard.
};

}  // namespace logprobd
