#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/scoring_engine.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/cuda_scorer.h"
#include "server/engine/workspace_plan.h"

namespace logprobd {

/// Holds the inputs and the scores of the rows of a batch in flight, on the host and on the device,
/// and the batch's events.
///
/// Both sides have the same layout, which depends on the batch's counts, so that one copy transfers
/// all inputs and one copy transfers all scores. The shards of an engine share the host side: the
/// first shard fills it and receives the scores. A batch with more candidates than a slot holds is
/// scored in several passes; only the first pass computes the other scores.
class CudaSlot {
 public:
  /// Events that time the stages of a block.
  struct BlockEvents {
    CudaEvent copy_begin;
    CudaEvent gather_begin;  ///< The rows that come from the host have been copied.
    bool is_spread = false;  ///< True if the other rows are copied from other shards.
    CudaEvent copy_end;
    CudaEvent kernel_begin;
    CudaEvent kernel_end;
    CudaEvent combine_end;
  };

  /// Creates the host side for the slots of all shards. The slots must be idle when it is
  /// destroyed.
  static absl::StatusOr<std::shared_ptr<PinnedBuffer>> CreateHostSide(const WorkspacePlan& plan);

  static absl::StatusOr<CudaSlot> Create(const WorkspacePlan& plan,
                                         std::shared_ptr<PinnedBuffer> host);

  /// Returns the number of passes that `batch` takes, >= 1.
  int64_t NumPasses(const ScoreBatch& batch) const;

  /// Sets the layout for pass `pass` of `batch`. The slot must be idle.
  void Prepare(const ScoreBatch& batch, int64_t pass);

  /// Writes the inputs to the host side, for all shards. `correction` becomes part of the scales
  /// (kernels::CorrectedLog2Scale). The slots of all shards must be idle.
  void FillHost(const ScoreBatch& batch, double correction);

  /// Returns the start of the half-open range of rows that the prepared pass scores; row_end()
  /// returns its end.
  int64_t row_begin() const { return row_begin_; }
  int64_t row_end() const { return row_end_; }

  /// Returns an option of the prepared pass that affects the memory per row.
  int32_t top_k() const { return top_k_; }
  bool has_entropy_scales() const { return has_entropy_scales_; }

  absl::Status EnqueueInputs(cudaStream_t stream);
  absl::Status EnqueueOutputs(cudaStream_t stream);

  /// Returns the block of rows [row_begin, row_begin + num_rows) in device memory, without its
  /// hidden rows. Call it after the first shard's FillHost.
  CudaBlock Block(int64_t row_begin, int64_t num_rows) const;

  /// Copies the scores of the pass from the host side into the spans of `batch`. The copy from the
  /// device must have ended.
  void CopyOut(ScoreBatch& batch) const;

  std::vector<BlockEvents>& blocks() { return blocks_; }
  cudaEvent_t output_begin() const { return output_begin_.get(); }
  /// Returns the last event of the pass.
  cudaEvent_t output_end() const { return output_end_.get(); }

 private:
  /// Size of every input and every score in bytes.
  static constexpr int64_t kWordBytes = 4;

  /// Calls `visit(column, offset)` for each column with one score per row that the pass computes;
  /// `offset` is in bytes. The flags for nonfinite rows follow the last column.
  template <typename Visit>
  void ForEachScoredColumn(const Visit& visit) const;
  int64_t nonfinite() const { return top_k_ids_ - num_rows_ * kWordBytes; }

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
  OutputSet pass_outputs_;
  bool has_entropy_scales_ = false;
  int64_t candidate_begin_ = 0;
  int64_t num_candidates_ = 0;
  /// Byte offsets into both sides. Targets, scales and entropy scales lie before `candidate_rows_`.
  int64_t candidate_rows_ = 0;
  int64_t candidate_ids_ = 0;
  int64_t outputs_ = 0;
  int64_t top_k_ids_ = 0;
  int64_t top_k_logprobs_ = 0;
  int64_t candidate_logprobs_ = 0;
  int64_t end_ = 0;
};

}  // namespace logprobd
