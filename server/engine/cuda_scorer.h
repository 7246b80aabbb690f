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
#include "kernels/combine/shard_sums.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "server/engine/collective.h"
#include "server/engine/cuda_gemm.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_memory.h"

namespace logprobd {

/// The two ways from hidden rows to partials. Both give the same bits.
enum class ScorePath {
  kFused,    ///< kernels/fused_sm90: logits stay in registers.
  kChunked,  ///< cuBLASLt and kernels/chunked: chunks of logits in memory.
};

/// A block of rows to score, all in device memory. Arrays start at the block's first row unless
/// they say otherwise.
struct CudaBlock {
  kernels::Dtype hidden_dtype = kernels::Dtype::kBf16;
  ScorePath path = ScorePath::kChunked;
  /// A buffer of plan.hidden_bytes whose rows lie at CudaScorer::HiddenOffset(hidden_dtype),
  /// padded_hidden apart and zero beyond hidden_size; all of it may be read. Rows that are not
  /// multiplied as they are get converted into the space before them.
  std::byte* hidden = nullptr;
  int64_t num_rows = 0;   ///< 1 to CudaScorer::BlockRows.
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

  /// Those of other rows are left alone.
  int64_t num_candidates = 0;
  const int32_t* candidate_rows = nullptr;
  const int32_t* candidate_ids = nullptr;
  float* candidate_logprobs = nullptr;
};

/// Scores blocks of rows against a head, or a shard of one, on one GPU. Owns the workspace; nothing
/// is allocated after creation. One stream at a time.
class CudaScorer {
 public:
  /// RESOURCE_EXHAUSTED names the memory that is missing. `algorithm_index`: see CudaGemm.
  static absl::StatusOr<std::unique_ptr<CudaScorer>> Create(const kernels::ChunkPlan& plan,
                                                            std::shared_ptr<const CudaHead> head,
                                                            int algorithm_index = 0);

  /// How rows are scored: the fused kernel's way wherever it can.
  ScorePath PathOf(kernels::Dtype hidden_dtype) const;

  /// What the scales of rows of this dtype must hold beside the temperature: the tensor cores'
  /// truncation, unless the transform of the logits takes it.
  double Correction(kernels::Dtype hidden_dtype) const;

  /// Most rows of a block.
  int64_t BlockRows(ScorePath path, kernels::Dtype hidden_dtype, bool has_entropy_scales,
                    int32_t top_k) const;

  /// See ScoringEngine::row_step: of the fused kernel, for rows of the head's dtype.
  int64_t RowStep(int64_t num_rows) const;

  /// Enqueues on `stream` the way from hidden rows to tile partials and returns without waiting.
  absl::Status EnqueuePartials(const CudaBlock& block, cudaStream_t stream);

  /// Likewise from the partials to the scores; follows EnqueuePartials of the same block. Where the
  /// head lies in shards, each calls it with its rank; the first gets the scores.
  absl::Status EnqueueScores(const CudaBlock& block, cudaStream_t stream);
  absl::Status EnqueueShardScores(const CudaBlock& block, int32_t rank, Collective& collective,
                                  cudaStream_t stream);

  const kernels::ChunkPlan& plan() const { return plan_; }

  /// Byte offset of a block's rows in its hidden buffer.
  int64_t HiddenOffset(kernels::Dtype hidden_dtype) const;

  /// The GEMM algorithm for head and hidden of one 16-bit dtype, or fp32 heads.
  const std::string& algorithm() const { return native_->description(); }

 private:
  CudaScorer(const kernels::ChunkPlan& plan, std::shared_ptr<const CudaHead> head)
      : plan_(plan), head_(std::move(head)) {}

  absl::Status Allocate();
  absl::Status EnqueueConversion(const CudaBlock& block, cudaStream_t stream);
  kernels::FusedPartialsParams FusedParams(const CudaBlock& block) const;
  absl::Status EnqueueFused(const CudaBlock& block, cudaStream_t stream);
  kernels::RowScoresParams RowScores(const CudaBlock& block) const;
  absl::Status EnqueueShardSums(const CudaBlock& block, int32_t rank, Collective& collective,
                                cudaStream_t stream);
  /// The lists of all shards become the first one's.
  absl::Status EnqueueShardTopK(const CudaBlock& block, int32_t rank, Collective& collective,
                                cudaStream_t stream);
  /// Keys become ids and logprobs, logits of candidates logprobs.
  absl::Status EnqueueListScores(const CudaBlock& block, cudaStream_t stream);
  /// After the combine: overwrites the partials.
  absl::Status EnqueueFusedTopK(const CudaBlock& block, cudaStream_t stream);
  /// The weight of a chunk as it is multiplied; what that is made of is enqueued.
  absl::StatusOr<const std::byte*> EnqueueWeight(kernels::Dtype hidden_dtype, int64_t tile,
                                                 int64_t num_tiles, cudaStream_t stream);
  absl::Status EnqueueChunk(const CudaBlock& block, int64_t tile, int64_t num_tiles,
                            cudaStream_t stream);

  /// Factor that takes the truncation back from dot products with rows of this dtype, or 1.
  double DotCorrection(kernels::Dtype hidden_dtype) const;
  kernels::LogitTransform Transform(kernels::Dtype hidden_dtype) const;

  const float* bias() const { return reinterpret_cast<const float*>(head_->bias.get()); }
  /// The arena holds, on the fused path, keys of the top-k, sums, second sums and the tiles'
  /// maxima; on the chunked path sums and second sums, the rest at fixed places.
  uint64_t* TopKKeys(const CudaBlock& block) const;
  kernels::TileSums* Sums(const CudaBlock& block) const;
  kernels::TileSums* EntropySums(const CudaBlock& block) const;
  float* TileMax(const CudaBlock& block) const;
  uint64_t* MaxKeys(const CudaBlock& block) const;
  uint32_t* MinKeys(const CudaBlock& block) const;

  const kernels::ChunkPlan plan_;
  const std::shared_ptr<const CudaHead> head_;
  bool truncates_ = false;            ///< This GPU's tensor cores do, by a known amount.
  std::unique_ptr<CudaGemm> native_;  ///< Pairs multiplied as stored, and all with an fp32 head.
  std::unique_ptr<CudaGemm> mixed_;   ///< Others: as terms or widened; null for fp32 heads.

  DeviceBuffer arena_;
  DeviceBuffer row_state_;
  float* logits_ = nullptr;  ///< Into the arena, as the next.
  std::byte* converted_weight_ = nullptr;
  kernels::RowNormalizer* normalizers_ = nullptr;  ///< Into row_state_, as the rest.
  uint64_t* max_keys_ = nullptr;
  uint64_t* top_k_keys_ = nullptr;
  float* target_logits_ = nullptr;
  uint32_t* min_keys_ = nullptr;
  int64_t* row_sums_ = nullptr;  ///< What shards join, as the next; null for a head that is whole.
  int32_t* exponents_ = nullptr;
};

}  // namespace logprobd
