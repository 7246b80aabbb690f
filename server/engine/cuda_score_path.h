#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/combine/row_scores.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/workspace_plan.h"

// The two paths from hidden rows to tile partials, and what they share with CudaScorer.

namespace logprobd {

/// A block of rows to score, in device memory. Arrays start at the block's first row unless stated
/// otherwise.
struct CudaBlock {
  kernels::Dtype hidden_dtype = kernels::Dtype::kBf16;
  /// A buffer of plan.hidden_bytes, all of it readable. The rows start at plan.HiddenOffset, are
  /// padded_hidden elements apart and zero beyond hidden_size. Rows that have to be converted are
  /// converted into the space before them.
  std::byte* hidden = nullptr;
  int64_t num_rows = 0;   ///< 1 to CudaScorer::BlockRows.
  int64_t row_begin = 0;  ///< Index of the block's first row in its batch, for the candidates.
  const int32_t* targets = nullptr;
  const float* log2_scales = nullptr;
  const float* entropy_log2_scales = nullptr;  ///< Null: the entropy uses log2_scales.

  /// Where the scores go; a null pointer means that the score is not requested. `nonfinite` is
  /// required. CudaScorer fills in inputs, sizes and `normalizers`.
  kernels::RowScoresParams scores;

  int32_t top_k = 0;  ///< 0: no list is requested.
  int32_t* top_k_ids = nullptr;
  float* top_k_logprobs = nullptr;

  /// Candidates of the batch; those of rows outside this block are not touched.
  int64_t num_candidates = 0;
  const int32_t* candidate_rows = nullptr;
  const int32_t* candidate_ids = nullptr;
  float* candidate_logprobs = nullptr;
};

/// The head and the device memory with which a GPU scores, one block at a time. Both paths and the
/// combine use it.
struct CudaWorkspace {
  const WorkspacePlan plan;
  const std::shared_ptr<const CudaHead> head;
  bool truncates = false;  ///< True if this GPU's tensor cores truncate by a known amount.

  DeviceBuffer arena;      ///< plan.arena_bytes; each path divides it in its own way.
  DeviceBuffer row_state;  ///< plan.row_state_bytes, divided into the arrays below.
  kernels::RowNormalizer* normalizers = nullptr;  ///< [row_state_rows]
  uint64_t* max_keys = nullptr;                   ///< [row_state_rows]
  uint64_t* chunked_top_k_keys = nullptr;         ///< [block_rows, top_k_max], chunked path only.
  float* target_logits = nullptr;                 ///< [row_state_rows]
  uint32_t* min_keys = nullptr;                   ///< [row_state_rows]
  /// [kSharedSumFields, row_state_rows] and [2, row_state_rows]: reduced over the shards; null for
  /// one shard.
  int64_t* row_sums = nullptr;
  int32_t* exponents = nullptr;

  /// Allocates the memory on the current device. RESOURCE_EXHAUSTED names the memory that is
  /// missing.
  static absl::StatusOr<std::unique_ptr<CudaWorkspace>> Create(
      const WorkspacePlan& plan, std::shared_ptr<const CudaHead> head);

  /// The correction for truncation that the scales of rows of this dtype must contain in addition
  /// to the temperature; 1 where Transform contains it.
  double Correction(kernels::Dtype hidden_dtype) const;

  /// The transform of logits, which contains the correction where the head has a transform.
  kernels::LogitTransform Transform(kernels::Dtype hidden_dtype) const;

  const float* bias() const { return reinterpret_cast<const float*>(head->bias.get()); }

  /// Keys of the largest and of the smallest logit of each row; null if no score of the block needs
  /// them.
  uint64_t* MaxKeys(const CudaBlock& block) const;
  uint32_t* MinKeys(const CudaBlock& block) const;

  /// The partials at the entropy's temperature, which follow the block's `sums`; null if the block
  /// has only one temperature.
  kernels::TileSums* EntropySums(const CudaBlock& block, kernels::TileSums* sums) const;

 private:
  CudaWorkspace(const WorkspacePlan& workspace_plan, std::shared_ptr<const CudaHead> shared_head);

  /// Factor that corrects dot products with rows of this dtype for truncation, or 1.
  double DotCorrection(kernels::Dtype hidden_dtype) const;
};

/// A path from hidden rows to tile partials. Both paths give the same bits. One stream at a time.
class ScorePath {
 public:
  virtual ~ScorePath() = default;

  /// Most rows of a block.
  virtual int64_t BlockRows(kernels::Dtype hidden_dtype, bool has_entropy_scales,
                            int32_t top_k) const = 0;

  /// See ScoringEngine::row_step.
  virtual int64_t RowStep(int64_t num_rows) const = 0;

  /// Where the tile partials of a block lie: [num_rows, num_tiles] in the arena.
  virtual kernels::TileSums* Sums(const CudaBlock& block) const = 0;

  /// Where the top-k keys of a block lie: [num_rows, top_k].
  virtual uint64_t* TopKKeys(const CudaBlock& block) const = 0;

  /// Enqueues the work from hidden rows, as they are multiplied, to partials, extreme keys and the
  /// logits of targets and candidates.
  virtual absl::Status EnqueuePartials(const CudaBlock& block, cudaStream_t stream) = 0;

  /// Enqueues what is left of the top-k keys after EnqueuePartials and the combine. It may
  /// overwrite the partials.
  virtual absl::Status EnqueueTopK(const CudaBlock& block, cudaStream_t stream) = 0;
};

/// The path through kernels/fused_sm90, which keeps logits in registers.
std::unique_ptr<ScorePath> CreateFusedPath(const CudaWorkspace& workspace);

/// The path through cuBLASLt and kernels/chunked, which writes chunks of logits to memory.
struct ChunkedPath {
  std::unique_ptr<ScorePath> path;
  std::string algorithm;  ///< GEMM of hidden rows in the head's own dtype, in cuBLASLt's numbers.
};

/// `algorithm_index`: see CudaGemm. INTERNAL if cuBLASLt has no algorithm for every shape.
absl::StatusOr<ChunkedPath> CreateChunkedPath(const CudaWorkspace& workspace, int algorithm_index);

}  // namespace logprobd
