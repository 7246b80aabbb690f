#include "server/engine/cuda_score_path.h"

#include <utility>

#include "server/base/errors.h"

namespace logprobd {
CudaWorkspace::CudaWorkspace(const WorkspacePlan& workspace_plan,
                             std::shared_ptr<const CudaHead> shared_head)
    : plan(workspace_plan), head(std::move(shared_head)) {}

absl::StatusOr<std::unique_ptr<CudaWorkspace>> CudaWorkspace::Create(
    const WorkspacePlan& plan, std::shared_ptr<const CudaHead> head) {
  std::unique_ptr<CudaWorkspace> workspace(new CudaWorkspace(plan, std::move(head)));
  int device = 0;
  int major = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  workspace->truncates = major == kernels::kTruncationMajor;
  LOGPROBD_ASSIGN_OR_RETURN(workspace->arena,
                            AllocateDevice(plan.arena_bytes, "partials and logits"));
  LOGPROBD_ASSIGN_OR_RETURN(workspace->row_state,
                            AllocateDevice(plan.row_state_bytes, "row states"));
  CudaWorkspace& w = *workspace;
  w.normalizers = reinterpret_cast<kernels::RowNormalizer*>(w.row_state.get());
  w.max_keys = reinterpret_cast<uint64_t*>(w.normalizers + plan.row_state_rows);
  w.chunked_top_k_keys = w.max_keys + plan.row_state_rows;
  w.target_logits =
      reinterpret_cast<float*>(w.chunked_top_k_keys + plan.block_rows * plan.top_k_max);
  w.min_keys = reinterpret_cast<uint32_t*>(w.target_logits + plan.row_state_rows);
  w.rank_counts = reinterpret_cast<int32_t*>(w.min_keys + plan.row_state_rows);
  if (plan.num_shards > 1) {  // aligned, since the number of rows is even
    w.row_sums = reinterpret_cast<int64_t*>(w.rank_counts + plan.row_state_rows);
    w.exponents = reinterpret_cast<int32_t*>(w.row_sums + kSharedSumFields * plan.row_state_rows);
  }
  return workspace;
}

double CudaWorkspace::DotCorrection(kernels::Dtype hidden_dtype) const {
  return truncates && plan.UsesTensorCores(hidden_dtype)
             ? kernels::TruncationCorrection(plan.hidden_size)
             : 1.0;
}

kernels::CorrectedTransform CudaWorkspace::Transform(kernels::Dtype hidden_dtype) const {
  return kernels::Corrected(head->transform, bias() != nullptr, DotCorrection(hidden_dtype));
}

uint64_t* CudaWorkspace::MaxKeys(const CudaBlock& block) const {
  const kernels::RowScoresParams& scores = block.scores;
  const bool are_needed = scores.argmax_id != nullptr || scores.argmax_logprob != nullptr ||
                          scores.max_logit != nullptr;
  return are_needed ? max_keys : nullptr;
}

uint32_t* CudaWorkspace::MinKeys(const CudaBlock& block) const {
  return block.scores.min_logit != nullptr ? min_keys : nullptr;
}

int32_t* CudaWorkspace::RankCounts(const CudaBlock& block) const {
  return block.scores.target_rank != nullptr ? rank_counts : nullptr;
}

kernels::TileSums* CudaWorkspace::EntropySums(const CudaBlock& block,
                                              kernels::TileSums* sums) const {
  return block.entropy_log2_scales == nullptr ? nullptr : sums + plan.num_tiles * block.num_rows;
}

}  // namespace logprobd
