#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/chunked/chunk_plan.h"
#include "server/base/scoring_engine.h"
#include "server/engine/cuda_memory.h"
#include "server/engine/cuda_scorer.h"

namespace logprobd {

/// The rows' inputs and scores of a batch in flight, on both sides of the bus, and its events.
///
/// Both sides have one layout, by the batch's own counts, so that one copy each way moves all of
/// it. The host's side is shared by the shards of an engine: the first fills it and gets the
/// scores. A batch with more candidates than fit is scored in passes over parts of them; only the
/// first pass gives the other scores.
class CudaSlot {
 public:
  /// When the parts of a block ran, for the stage metrics.
  struct BlockEvents {
    CudaEvent copy_begin;
    CudaEvent gather_begin;  ///< What comes from the host has come.
    bool is_spread = false;  ///< The rest comes from other shards.
    CudaEvent copy_end;
    CudaEvent kernel_begin;
    CudaEvent kernel_end;
    CudaEvent combine_end;
  };

  /// A host side for the slots of all shards, which must be idle before it goes.
  static absl::StatusOr<std::shared_ptr<PinnedBuffer>> CreateHostSide(
      const kernels::ChunkPlan& plan);

  static absl::StatusOr<CudaSlot> Create(const kernels::ChunkPlan& plan,
                                         std::shared_ptr<PinnedBuffer> host);

  /// Passes that `batch` takes, >= 1.
  int64_t NumPasses(const ScoreBatch& batch) const;

  /// Lays out pass `pass` of `batch`. The slot must be idle.
  void Prepare(const ScoreBatch& batch, int64_t pass);

  /// Fills the host side, for all shards; `correction` goes into the scales (kernels::Log2Scale).
  /// All shards' slots must be idle.
  void FillHost(const ScoreBatch& batch, double correction);

  /// Rows that the prepared pass has to score, half-open.
  int64_t row_begin() const { return row_begin_; }
  int64_t row_end() const { return row_end_; }

  /// What the prepared pass asks for that takes memory by the row.
  int32_t top_k() const { return top_k_; }
  bool has_entropy_scales() const { return has_entropy_scales_; }

  absl::Status EnqueueInputs(cudaStream_t stream);
  absl::Status EnqueueOutputs(cudaStream_t stream);

  /// The block of rows [row_begin, row_begin + num_rows) in device memory; the hidden rows are the
  /// caller's to add. Once the host side is filled.
  CudaBlock Block(int64_t row_begin, int64_t num_rows) const;

  /// Copies the scores of the pass into the spans of `batch`; its outputs must have arrived.
  void CopyOut(ScoreBatch& batch) const;

  std::vector<BlockEvents>& blocks() { return blocks_; }
  cudaEvent_t output_begin() const { return output_begin_.get(); }
  /// The last of what was enqueued for the pass.
  cudaEvent_t output_end() const { return output_end_.get(); }

 private:
  /// Scores of four bytes a row, in the order in which they lie behind the inputs.
  enum Field {
    kLogprobField,
    kEntropyField,
    kLseField,
    kArgmaxIdField,
    kArgmaxLogprobField,
    kSumPSquaredField,
    kMaxLogitField,
    kMinLogitField,
    kNonfiniteField,  // one byte a row used
    kNumFields,
  };

  int64_t field(Field index) const { return outputs_ + index * num_rows_ * 4; }
  template <typename T>
  T* device(int64_t offset) const {
    return reinterpret_cast<T*>(device_.get() + offset);
  }
  template <typename T>
  T* host(int64_t offset) const {
    return reinterpret_cast<T*>(host_->get() + offset);
  }

  DeviceBuffer device_;
  std::shared_ptr<PinnedBuffer> host_;
  std::vector<BlockEvents> blocks_;
  CudaEvent output_begin_;
  CudaEvent output_end_;
  int64_t candidates_per_pass_ = 0;

  int64_t pass_ = 0;
  int64_t num_rows_ = 0;
  int64_t row_begin_ = 0;
  int64_t row_end_ = 0;
  int32_t top_k_ = 0;
  OutputSet outputs_asked_;
  bool has_entropy_scales_ = false;
  int64_t candidate_begin_ = 0;
  int64_t num_candidates_ = 0;
  /// Byte offsets. Targets, scales and entropy scales lie before `candidate_rows_`.
  int64_t candidate_rows_ = 0;
  int64_t candidate_ids_ = 0;
  int64_t outputs_ = 0;
  int64_t top_k_ids_ = 0;
  int64_t top_k_logprobs_ = 0;
  int64_t candidate_logprobs_ = 0;
  int64_t end_ = 0;
};

}  // namespace logprobd
