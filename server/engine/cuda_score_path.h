#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/combine/row_scores.h"
#include "kernels/common/logit_scale.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/workspace_plan.h"

// The two paths from hidden rows to tile partials, and the types that they share with CudaScorer.

namespace logprobd {

/// A block of rows to score. All arrays are in device memory and start at the block's first row
/// unless stated otherwise.
struct CudaBlock {
  kernels::Dtype hidden_dtype = kernels::Dtype::kBf16;
  /// A buffer of plan.hidden_bytes, all of it readable. The rows start at plan.HiddenOffset, are
  /// padded_hidden elements apart and are zero beyond hidden_size. If the rows need a conversion,
  /// its result is written to the space before them.
  std::byte* hidden = nullptr;
  int64_t num_rows = 0;   ///< 1 to CudaScorer::BlockRows.
  int64_t row_begin = 0;  ///< Index of the block's first row in its batch, for the candidates.
  const int32_t* targets = nullptr;
  const float* log2_scales = nullptr;
  const float* entropy_log2_scales = nullptr;  ///< If null, the entropy uses log2_scales.

  /// The arrays that receive the scores; a null pointer means that the score is not requested.
  /// `nonfinite` is required. CudaScorer sets the inputs, sizes and `normalizers`.
  kernels::RowScoresParams scores;

  int32_t top_k = 0;  ///< 0 if no list is requested.
  int32_t* top_k_ids = nullptr;
  float* top_k_logprobs = nullptr;

  /// Candidates of the batch. Candidates of rows outside this block are not changed.
  int64_t num_candidates = 0;
  const int32_t* candidate_rows = nullptr;
  const int32_t* candidate_ids = nullptr;
  float* candidate_logprobs = nullptr;
};

/// The head and the device memory with which a GPU scores one block at a time. Both paths and the
/// combine step use it.
struct CudaWorkspace : RowState {
  const WorkspacePlan plan;
  const std::shared_ptr<const CudaHead> head;
  bool truncates = false;  ///< True if this GPU's tensor cores truncate by a known amount.

  DeviceBuffer arena;      ///< plan.arena_bytes; each path divides it in its own way.
  DeviceBuffer row_state;  ///< plan.row_state_bytes, which hold the arrays of RowState.

  /// Allocates the memory on the current device. If memory runs out, returns RESOURCE_EXHAUSTED,
  /// and the message names the buffer.
  static absl::StatusOr<std::unique_ptr<CudaWorkspace>> Create(
      const WorkspacePlan& plan, std::shared_ptr<const CudaHead> head);

  /// Returns the transform of logits of rows of this dtype, corrected for truncation.
  kernels::CorrectedTransform Transform(kernels::Dtype hidden_dtype) const;

  const float* bias() const { return reinterpret_cast<const float*>(head->bias.get()); }

  /// Returns the keys of the largest (MaxKeys) or smallest (MinKeys) logit of each row, or null if
  /// no score of the block needs them.
  uint64_t* MaxKeys(const CudaBlock& block) const;
  uint32_t* MinKeys(const CudaBlock& block) const;

  /// Returns the number of logits of each row above the target's, or null if no score of the block
  /// needs it.
  int32_t* RankCounts(const CudaBlock& block) const;

  /// Returns the partials at the entropy's temperature, which follow the block's `sums`, or null if
  /// the block has only one temperature.
  kernels::TileSums* EntropySums(const CudaBlock& block, kernels::TileSums* sums) const;

 private:
  CudaWorkspace(const WorkspacePlan& workspace_plan, std::shared_ptr<const CudaHead> shared_head);

  /// Returns the factor that corrects dot products with rows of this dtype for truncation, or 1 if
  /// they need no correction.
  double DotCorrection(kernels::Dtype hidden_dtype) const;
};

/// A path from hidden rows to tile partials. On Hopper the results of both paths are bit-identical;
/// on other GPUs the order in which cuBLASLt adds products is not known. An object may be used on
/// one stream at a time.
class ScorePath {
 public:
  virtual ~ScorePath() = default;

  /// Returns the maximum number of rows of a block.
  virtual int64_t BlockRows(kernels::Dtype hidden_dtype, bool has_entropy_scales,
                            int32_t top_k) const = 0;

  /// See ScoringEngine::row_step.
  virtual int64_t RowStep(int64_t num_rows) const = 0;

  /// Returns the tile partials of a block, [num_rows, num_tiles] in the arena.
  virtual kernels::TileSums* Sums(const CudaBlock& block) const = 0;

  /// Returns the top-k keys of a block, [num_rows, top_k].
  virtual uint64_t* TopKKeys(const CudaBlock& block) const = 0;

  /// Enqueues the computation of the logits of the targets that this shard holds. Blocks that ask
  /// for the target's rank need them before EnqueuePartials. The hidden rows must already be
  /// converted. It may overwrite the arena.
  virtual absl::Status EnqueueTargetLogits(const CudaBlock& block, cudaStream_t stream) = 0;

  /// Enqueues the kernels that compute partials, the keys of the largest and smallest logits, the
  /// counts of the target's rank, and the logits of targets and candidates. The hidden rows must
  /// already be converted.
  virtual absl::Status EnqueuePartials(const CudaBlock& block, cudaStream_t stream) = 0;

  /// Enqueues the rest of the computation of the top-k keys; call it after EnqueuePartials and the
  /// combine. It may overwrite the partials.
  virtual absl::Status EnqueueTopK(const CudaBlock& block, cudaStream_t stream) = 0;
};

/// Creates the path through kernels/fused, whose kernels keep logits in registers, on the current
/// device.
std::unique_ptr<ScorePath> CreateFusedPath(const CudaWorkspace& workspace);

/// The path through cuBLASLt and kernels/chunked, which writes chunks of logits to memory.
struct ChunkedPath {
  std::unique_ptr<ScorePath> path;
  /// Description of the GEMM algorithm for hidden rows of the head's dtype, in cuBLASLt's numbers.
  std::string algorithm;
};

/// Creates the chunked path. For `algorithm_index`, see CudaGemm::Options. Returns INTERNAL if
/// cuBLASLt has no algorithm that computes every shape.
absl::StatusOr<ChunkedPath> CreateChunkedPath(const CudaWorkspace& workspace, int algorithm_index);

}  // namespace logprobd
