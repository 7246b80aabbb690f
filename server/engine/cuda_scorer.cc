#include "server/engine/cuda_scorer.h"

#include <optional>
#include <utility>

#include "kernels/chunked/convert_elements.h"
#include "kernels/combine/list_scores.h"
#include "kernels/combine/peer_scores.h"
#include "kernels/combine/shard_sums.h"
#include "server/base/errors.h"

namespace logprobd {
absl::StatusOr<std::unique_ptr<CudaScorer>> CudaScorer::Create(const WorkspacePlan& plan,
                                                               std::shared_ptr<const CudaHead> head,
                                                               int algorithm_index) {
  LOGPROBD_ASSIGN_OR_RETURN(auto workspace, CudaWorkspace::Create(plan, std::move(head)));
  std::unique_ptr<CudaScorer> scorer(new CudaScorer(std::move(workspace)));
  LOGPROBD_ASSIGN_OR_RETURN(scorer->chunked_,
                            CreateChunkedPath(*scorer->workspace_, algorithm_index));
  if (plan.with_fused) scorer->fused_ = CreateFusedPath(*scorer->workspace_);
  return scorer;
}

bool CudaScorer::IsFused(kernels::Dtype hidden_dtype) const {
  return plan().with_fused && plan().UsesTensorCores(hidden_dtype);
}

absl::Status CudaScorer::EnqueuePartials(const CudaBlock& block, cudaStream_t stream) {
  LOGPROBD_RETURN_IF_ERROR(EnqueueBegin(block, stream));
  return PathOf(block.hidden_dtype).EnqueuePartials(block, stream);
}

absl::Status CudaScorer::EnqueueShardPartials(const CudaBlock& block, int32_t rank,
                                              Collective& collective, cudaStream_t stream) {
  LOGPROBD_RETURN_IF_ERROR(EnqueueBegin(block, stream));
  if (workspace_->RankCounts(block) != nullptr) {
    const kernels::Reduction target_logits = {workspace_->target_logits, block.num_rows,
                                              kernels::ReductionType::kSumInt32};
    LOGPROBD_RETURN_IF_ERROR(collective.AllReduce(rank, {target_logits}, stream));
  }
  return PathOf(block.hidden_dtype).EnqueuePartials(block, stream);
}

absl::Status CudaScorer::EnqueueBegin(const CudaBlock& block, cudaStream_t stream) {
  LOGPROBD_RETURN_IF_ERROR(EnqueueConversion(block, stream));
  LOGPROBD_RETURN_IF_ERROR(EnqueueClear(block, stream));
  return workspace_->RankCounts(block) == nullptr
             ? absl::OkStatus()
             : PathOf(block.hidden_dtype).EnqueueTargetLogits(block, stream);
}

absl::Status CudaScorer::EnqueueClear(const CudaBlock& block, cudaStream_t stream) {
  const auto num_rows = static_cast<size_t>(block.num_rows);
  if (uint64_t* const max_keys = workspace_->MaxKeys(block)) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(max_keys, 0, num_rows * sizeof(uint64_t), stream));
  }
  if (uint32_t* const min_keys = workspace_->MinKeys(block)) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(min_keys, 0, num_rows * sizeof(uint32_t), stream));
  }
  if (int32_t* const rank_counts = workspace_->RankCounts(block)) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(rank_counts, 0, num_rows * sizeof(int32_t), stream));
  }
  if (plan().num_shards == 1) return absl::OkStatus();
  // A shard contributes zero for the targets and candidates of other shards.
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(workspace_->target_logits, 0, num_rows * sizeof(float), stream));
  if (block.num_candidates > 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(block.candidate_logprobs, 0,
                        static_cast<size_t>(block.num_candidates) * sizeof(float), stream));
  }
  return absl::OkStatus();
}

absl::Status CudaScorer::EnqueueConversion(const CudaBlock& block, cudaStream_t stream) {
  const int64_t offset = plan().HiddenOffset(block.hidden_dtype);
  if (offset == 0) return absl::OkStatus();
  const std::byte* const source = block.hidden + offset;
  if (plan().ProductFormOf(block.hidden_dtype) == ProductForm::kBf16Split) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchBf16Split({.dtype = block.hidden_dtype,
                                                            .in = source,
                                                            .in_stride = plan().padded_hidden,
                                                            .num_rows = block.num_rows,
                                                            .hidden_size = plan().hidden_size,
                                                            .out = block.hidden},
                                                           stream));
  } else {
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchWiden(
        source, block.hidden_dtype, PadRows(block.num_rows) * plan().padded_hidden,
        reinterpret_cast<float*>(block.hidden), stream));
  }
  return absl::OkStatus();
}

kernels::RowScoresParams CudaScorer::RowScores(const CudaBlock& block) const {
  kernels::RowScoresParams scores = block.scores;
  scores.num_rows = block.num_rows;
  scores.num_tiles = plan().num_tiles;
  scores.vocab_size = plan().vocab_size;
  scores.layout = kernels::PartialLayoutOf(block.num_rows, plan().num_tiles);
  kernels::TileSums* const sums = PathOf(block.hidden_dtype).Sums(block);
  scores.sums = sums;
  scores.entropy_sums = workspace_->EntropySums(block, sums);
  scores.max_keys = workspace_->MaxKeys(block);
  scores.min_keys = workspace_->MinKeys(block);
  scores.log2_scales = block.log2_scales;
  scores.logit_correction = static_cast<float>(Correction(block.hidden_dtype));
  scores.target_logits = workspace_->target_logits;
  scores.rank_counts = workspace_->RankCounts(block);
  scores.normalizers = workspace_->normalizers;
  return scores;
}

absl::Status CudaScorer::EnqueueScores(const CudaBlock& block, cudaStream_t stream) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchRowScores(RowScores(block), stream));
  if (block.top_k > 0) {
    LOGPROBD_RETURN_IF_ERROR(PathOf(block.hidden_dtype).EnqueueTopK(block, stream));
  }
  return EnqueueListScores(block, stream);
}

absl::Status CudaScorer::EnqueueShardScores(const CudaBlock& block, int32_t rank,
                                            Collective& collective, cudaStream_t stream) {
  // For few rows, one kernel exchanges the sums and computes the scores, if the GPUs can access
  // each other's memory. That kernel does not exchange the counts of ranks.
  const bool wants_ranks = workspace_->RankCounts(block) != nullptr;
  std::optional<kernels::PeerStep> step;
  if (block.num_rows <= kernels::kPeerScoresRowsMax && !wants_ranks) {
    step = collective.TakePeerStep(rank);
  }
  if (step.has_value()) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchPeerScores({.step = *step, .scores = RowScores(block)}, stream));
    const kernels::Reduction candidates = {block.candidate_logprobs, block.num_candidates,
                                           kernels::ReductionType::kSumInt32};
    LOGPROBD_RETURN_IF_ERROR(collective.AllReduce(rank, {candidates}, stream));
  } else {
    LOGPROBD_RETURN_IF_ERROR(EnqueueShardSums(block, rank, collective, stream));
    if (rank == 0) {
      LOGPROBD_RETURN_IF_CUDA_ERROR(
          kernels::LaunchShardScores({.scores = RowScores(block),
                                      .has_sum_squares = block.scores.sum_p_squared != nullptr,
                                      .has_entropy_sums = block.entropy_log2_scales != nullptr,
                                      .exponents = workspace_->exponents,
                                      .row_sums = workspace_->row_sums},
                                     stream));
    }
  }
  if (block.top_k > 0) {
    LOGPROBD_RETURN_IF_ERROR(EnqueueShardTopK(block, rank, collective, stream));
  }
  return rank == 0 ? EnqueueListScores(block, stream) : absl::OkStatus();
}

absl::Status CudaScorer::EnqueueShardSums(const CudaBlock& block, int32_t rank,
                                          Collective& collective, cudaStream_t stream) {
  using kernels::Reduction;
  using kernels::ReductionType;
  const bool has_entropy_sums = block.entropy_log2_scales != nullptr;
  kernels::TileSums* const tile_sums = PathOf(block.hidden_dtype).Sums(block);
  const kernels::ShardSumsParams sums = {
      .num_rows = block.num_rows,
      .num_tiles = plan().num_tiles,
      .layout = kernels::PartialLayoutOf(block.num_rows, plan().num_tiles),
      .sums = tile_sums,
      .entropy_sums = workspace_->EntropySums(block, tile_sums),
      .wants_sum_squares = block.scores.sum_p_squared != nullptr,
      .exponents = workspace_->exponents,
      .row_sums = workspace_->row_sums};
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchShardExponents(sums, stream));
  const Reduction maxima[] = {
      {workspace_->exponents, kernels::NumSumSets(has_entropy_sums) * block.num_rows,
       ReductionType::kMaxInt32},
      {workspace_->max_keys, workspace_->MaxKeys(block) != nullptr ? block.num_rows : 0,
       ReductionType::kMaxUint64},
      {workspace_->min_keys, workspace_->MinKeys(block) != nullptr ? block.num_rows : 0,
       ReductionType::kMaxUint32}};
  LOGPROBD_RETURN_IF_ERROR(collective.AllReduce(rank, maxima, stream));
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchShardSums(sums, stream));
  // For ranks, EnqueueShardPartials has already exchanged the logits of the targets.
  int32_t* const rank_counts = workspace_->RankCounts(block);
  const Reduction sums_of_shards[] = {
      {workspace_->row_sums,
       kernels::NumSumFields(sums.wants_sum_squares, has_entropy_sums) * block.num_rows,
       ReductionType::kSumInt64},
      {workspace_->target_logits, rank_counts == nullptr ? block.num_rows : 0,
       ReductionType::kSumInt32},
      {rank_counts, rank_counts == nullptr ? 0 : block.num_rows, ReductionType::kSumInt32},
      {block.candidate_logprobs, block.num_candidates, ReductionType::kSumInt32}};
  return collective.AllReduce(rank, sums_of_shards, stream);
}

absl::Status CudaScorer::EnqueueShardTopK(const CudaBlock& block, int32_t rank,
                                          Collective& collective, cudaStream_t stream) {
  ScorePath& path = PathOf(block.hidden_dtype);
  LOGPROBD_RETURN_IF_ERROR(path.EnqueueTopK(block, stream));
  // The gathered keys overwrite the partials, which are no longer needed.
  auto* const gathered = reinterpret_cast<uint64_t*>(path.Sums(block));
  uint64_t* const keys = path.TopKKeys(block);
  LOGPROBD_RETURN_IF_ERROR(
      collective.Gather(rank, keys, block.num_rows * block.top_k, gathered, stream));
  if (rank != 0) return absl::OkStatus();
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchMergeTopK({.num_rows = block.num_rows,
                                                          .top_k = block.top_k,
                                                          .num_shards = plan().num_shards,
                                                          .gathered = gathered,
                                                          .keys = keys},
                                                         stream));
  return absl::OkStatus();
}

absl::Status CudaScorer::EnqueueListScores(const CudaBlock& block, cudaStream_t stream) {
  if (block.top_k > 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchTopKScores({.num_rows = block.num_rows,
                                   .top_k = block.top_k,
                                   .keys = PathOf(block.hidden_dtype).TopKKeys(block),
                                   .normalizers = workspace_->normalizers,
                                   .log2_scales = block.log2_scales,
                                   .ids = block.top_k_ids,
                                   .logprobs = block.top_k_logprobs},
                                  stream));
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchCandidateScores(
      {.rows = block.candidate_rows,
       .row_begin = static_cast<int32_t>(block.row_begin),
       .row_end = static_cast<int32_t>(block.row_begin + block.num_rows),
       .count = block.num_candidates,
       .normalizers = workspace_->normalizers,
       .log2_scales = block.log2_scales,
       .scores = block.candidate_logprobs},
      stream));
  return absl::OkStatus();
}

}  // namespace logprobd
