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
/// allocates nothing after creation. The dtypes alone decide which path scores a row. One stream at
/// a time.
class CudaScorer {
 public:
  /// RESOURCE_EXHAUSTED names the memory that is missing. `algorithm_index`: see CudaGemm.
  static absl::StatusOr<std::unique_ptr<CudaScorer>> Create(const WorkspacePlan& plan,
                                                            std::shared_ptr<const CudaHead> head,
                                                            int algorithm_index = 0);

  /// True if the fused kernel scores rows of this dtype.
  bool IsFused(kernels::Dtype hidden_dtype) const;

  /// Most rows of a block.
  int64_t BlockRows(kernels::Dtype hidden_dtype, bool has_entropy_scales, int32_t top_k) const {
    return PathOf(hidden_dtype).BlockRows(hidden_dtype, has_entropy_scales, top_k);
  }

  /// See ScoringEngine::row_step; for rows of the head's dtype.
  int64_t RowStep(int64_t num_rows) const { return PathOf(plan().head_dtype).RowStep(num_rows); }

  /// See CudaWorkspace::Correction.
  double Correction(kernels::Dtype hidden_dtype) const {
    return workspace_->Correction(hidden_dtype);
  }

  const WorkspacePlan& plan() const { return workspace_->plan; }

  /// The GEMM algorithm of the chunked path for hidden rows of the head's dtype.
  const std::string& algorithm() const { return chunked_.algorithm; }

  /// Enqueues on `stream` the work from hidden rows to tile partials, and returns without waiting.
  absl::Status EnqueuePartials(const CudaBlock& block, cudaStream_t stream);

  /// Enqueues the work from the partials to the scores; call it after EnqueuePartials of the same
  /// block.
  absl::Status EnqueueScores(const CudaBlock& block, cudaStream_t stream);

  /// The same for a head in shards. Every shard calls it with its rank; the scores go to rank 0.
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
  /// Clears the arrays of the block that kernels only raise, or write in part.
  absl::Status EnqueueClear(const CudaBlock& block, cudaStream_t stream);
  kernels::RowScoresParams RowScores(const CudaBlock& block) const;
  /// Reduces exponents, keys, sums and the logits of targets and candidates over all shards.
  absl::Status EnqueueShardSums(const CudaBlock& block, int32_t rank, Collective& collective,
                                cudaStream_t stream);
  /// Merges the top-k keys of all shards into those of rank 0.
  absl::Status EnqueueShardTopK(const CudaBlock& block, int32_t rank, Collective& collective,
                                cudaStream_t stream);
  /// Turns top-k keys into ids and logprobs, and the logits of candidates into logprobs.
  absl::Status EnqueueListScores(const CudaBlock& block, cudaStream_t stream);

  const std::unique_ptr<CudaWorkspace> workspace_;
  std::unique_ptr<ScorePath> fused_;  ///< Null if plan.with_fused is false.
  ChunkedPath chunked_;
};

}  // namespace logprobd
