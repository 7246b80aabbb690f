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
  kernels::Arena arrays(workspace->row_state.get());
  static_cast<RowState&>(*workspace) = PlaceRowState(plan, arrays);
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
