#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/combine/row_scores.h"
#include "server/engine/collective.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_score_path.h"
#include "server/engine/workspace_plan.h"

namespace logprobd {

/// Scores blocks of rows against a head, or a shard of one, on one GPU. Owns the workspace and
/// allocates nothing after creation. Only the dtypes determine which path scores a row. An object
/// may be used on one stream at a time.
class CudaScorer {
 public:
  /// Creates the workspace and the paths. For `algorithm_index`, see CudaGemm::Options. If memory
  /// runs out, returns RESOURCE_EXHAUSTED, and the message names the buffer. Returns INTERNAL if
  /// cuBLASLt has no algorithm that computes every shape.
  static absl::StatusOr<std::unique_ptr<CudaScorer>> Create(const WorkspacePlan& plan,
                                                            std::shared_ptr<const CudaHead> head,
                                                            int algorithm_index = 0);

  /// Returns true if the fused kernel scores rows of this dtype.
  bool IsFused(kernels::Dtype hidden_dtype) const;

  /// Returns the maximum number of rows of a block.
  int64_t BlockRows(kernels::Dtype hidden_dtype, bool has_entropy_scales, int32_t top_k) const {
    return PathOf(hidden_dtype).BlockRows(hidden_dtype, has_entropy_scales, top_k);
  }

  /// Returns the row step for rows of the head's dtype. See ScoringEngine::row_step.
  int64_t RowStep(int64_t num_rows) const { return PathOf(plan().head_dtype).RowStep(num_rows); }

  /// Returns the correction that the scales of temperatures contain (kernels::CorrectedTransform).
  double Correction(kernels::Dtype hidden_dtype) const {
    return workspace_->Transform(hidden_dtype).correction;
  }

  const WorkspacePlan& plan() const { return workspace_->plan; }

  /// Returns the description of the chunked path's GEMM algorithm for hidden rows of the head's
  /// dtype.
  const std::string& algorithm() const { return chunked_.algorithm; }

  /// Enqueues on `stream` the computation of the tile partials from the hidden rows, and returns
  /// without waiting.
  absl::Status EnqueuePartials(const CudaBlock& block, cudaStream_t stream);

  /// Enqueues the computation of the scores from the partials. Call it after EnqueuePartials of the
  /// same block.
  absl::Status EnqueueScores(const CudaBlock& block, cudaStream_t stream);

  /// Do the same for a head in shards. Every shard calls them with its rank; rank 0 receives the
  /// scores. Shards exchange the logits of their targets before the partials if the block asks for
  /// the target's rank.
  absl::Status EnqueueShardPartials(const CudaBlock& block, int32_t rank, Collective& collective,
                                    cudaStream_t stream);
  absl::Status EnqueueShardScores(const CudaBlock& block, int32_t rank, Collective& collective,
                                  cudaStream_t stream);

 private:
  explicit CudaScorer(std::unique_ptr<CudaWorkspace> workspace)
      : workspace_(std::move(workspace)) {}

  ScorePath& PathOf(kernels::Dtype hidden_dtype) const {
    return IsFused(hidden_dtype) ? *fused_ : *chunked_.path;
  }

  /// Converts the hidden rows of the block into the form in which they are multiplied.
  absl::Status EnqueueConversion(const CudaBlock& block, cudaStream_t stream);
  /// Prepares the hidden rows and arrays of the block, and enqueues the computation of the logits
  /// of this shard's targets if they are needed before the partials.
  absl::Status EnqueueBegin(const CudaBlock& block, cudaStream_t stream);
  /// Clears the arrays of the block that kernels write only in part or update with a maximum.
  absl::Status EnqueueClear(const CudaBlock& block, cudaStream_t stream);
  kernels::RowScoresParams RowScores(const CudaBlock& block) const;
  /// Reduces exponents, keys, sums and the logits of targets and candidates over all shards.
  absl::Status EnqueueShardSums(const CudaBlock& block, int32_t rank, Collective& collective,
                                cudaStream_t stream);
  /// Merges the top-k keys of all shards into those of rank 0.
  absl::Status EnqueueShardTopK(const CudaBlock& block, int32_t rank, Collective& collective,
                                cudaStream_t stream);
  /// Converts top-k keys into ids and logprobs, and the logits of candidates into logprobs.
  absl::Status EnqueueListScores(const CudaBlock& block, cudaStream_t stream);

  const std::unique_ptr<CudaWorkspace> workspace_;
  std::unique_ptr<ScorePath> fused_;  ///< Null if plan.with_fused is false.
  ChunkedPath chunked_;
};

}  // namespace logprobd
