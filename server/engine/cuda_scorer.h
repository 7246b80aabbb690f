#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/chunked/chunk_plan.h"
#include "kernels/chunked/logit_chunk.h"
#include "kernels/combine/row_scores.h"
#include "kernels/common/row_sums.h"
#include "server/engine/cuda_gemm.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_memory.h"

namespace logprobd {

/// A block of rows to score, all in device memory. Arrays start at the block's first row unless
/// they say otherwise.
struct CudaBlock {
  kernels::Dtype hidden_dtype = kernels::Dtype::kBf16;
  /// A buffer of plan.hidden_bytes whose rows lie at CudaScorer::HiddenOffset(hidden_dtype),
  /// padded_hidden apart and zero beyond hidden_size; up to PadRows(num_rows) rows are read. Mixed
  /// pairs are widened in place.
  std::byte* hidden = nullptr;
  int64_t num_rows = 0;   ///< 1 to plan.BlockRows(hidden_dtype).
  int64_t row_begin = 0;  ///< Of the block's first row in its batch, for the candidates.
  const int32_t* targets = nullptr;
  const float* log2_scales = nullptr;
  const float* entropy_log2_scales = nullptr;  ///< Null: as log2_scales.

  /// Where the scores go; null: not asked. Inputs and sizes are filled in by the scorer, as is
  /// `normalizers`; `nonfinite` must be given.
  kernels::RowScoresParams scores;

  int32_t top_k = 0;  ///< 0: not asked.
  int32_t* top_k_ids = nullptr;
  float* top_k_logprobs = nullptr;

  /// Of the whole batch; those of other rows are left alone.
  int64_t num_candidates = 0;
  const int32_t* candidate_rows = nullptr;
  const int32_t* candidate_ids = nullptr;
  float* candidate_logprobs = nullptr;
};

/// Scores blocks of rows against a head on one GPU through chunks of logits. Owns the workspace;
/// nothing is allocated after creation. One stream at a time.
class CudaScorer {
 public:
  /// RESOURCE_EXHAUSTED names the memory that is missing. `algorithm_index`: see CudaGemm.
  static absl::StatusOr<std::unique_ptr<CudaScorer>> Create(const kernels::ChunkPlan& plan,
                                                            std::shared_ptr<const CudaHead> head,
                                                            int algorithm_index = 0);

  /// Enqueues on `stream` the way from hidden rows to tile partials and returns without waiting.
  absl::Status EnqueuePartials(const CudaBlock& block, cudaStream_t stream);

  /// Likewise from the partials to the scores; follows EnqueuePartials of the same block.
  absl::Status EnqueueScores(const CudaBlock& block, cudaStream_t stream);

  const kernels::ChunkPlan& plan() const { return plan_; }

  /// Byte offset of a block's rows in its hidden buffer.
  int64_t HiddenOffset(kernels::Dtype hidden_dtype) const;

  /// The GEMM algorithm for head and hidden of one 16-bit dtype, or fp32 heads.
  const std::string& algorithm() const { return native_->description(); }

 private:
  CudaScorer(const kernels::ChunkPlan& plan, std::shared_ptr<const CudaHead> head)
      : plan_(plan), head_(std::move(head)) {}

  absl::Status Allocate();
  absl::Status EnqueueChunk(const CudaBlock& block, const std::byte* hidden, int64_t tile,
                            int64_t num_tiles, cudaStream_t stream);

  static bool WantsExtremes(const CudaBlock& block);

  const kernels::ChunkPlan plan_;
  const std::shared_ptr<const CudaHead> head_;
  std::unique_ptr<CudaGemm> native_;   ///< Pairs multiplied as stored.
  std::unique_ptr<CudaGemm> widened_;  ///< Mixed pairs, as fp32; null for fp32 heads.

  DeviceBuffer logits_;
  DeviceBuffer converted_weight_;
  DeviceBuffer partials_;
  DeviceBuffer row_state_;
  kernels::TileSums* sums_ = nullptr;
  kernels::TileSums* entropy_sums_ = nullptr;
  kernels::TileExtremes* extremes_ = nullptr;
  kernels::RowNormalizer* normalizers_ = nullptr;
  uint64_t* top_k_keys_ = nullptr;
  float* target_logits_ = nullptr;
};

}  // namespace logprobd
