#include <algorithm>

#include "kernels/common/dtype.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/listed_logits.h"
#include "kernels/fused/params.h"
#include "kernels/fused/top_k.h"
#include "server/engine/cuda_score_path.h"

namespace logprobd {
namespace {

/// Implements the fused path on the GPU that is current when it is created. The arena holds the
/// top-k keys, the partials, the partials at the entropy's temperature, and the largest logit of
/// each tile, in this order. After the combine, the search for the top-k overwrites everything
/// after the keys.
class FusedPath final : public ScorePath {
 public:
  explicit FusedPath(const CudaWorkspace& workspace)
      : workspace_(workspace), plan_(workspace.plan) {}

  int64_t BlockRows(kernels::Dtype hidden_dtype, bool has_entropy_scales,
                    int32_t top_k) const override {
    return plan_.FusedRows(hidden_dtype, has_entropy_scales ? 2 : 1, top_k);
  }

  int64_t RowStep(int64_t num_rows) const override {
    const int64_t block_rows =
        BlockRows(plan_.head_dtype, /*has_entropy_scales=*/false, /*top_k=*/0);
    return kernels::RowStepFor(arch_, {.num_rows = std::min(num_rows, block_rows),
                                       .num_tiles = plan_.num_tiles,
                                       .depth = plan_.padded_hidden});
  }

  kernels::TileSums* Sums(const CudaBlock& block) const override {
    const int64_t offset = WorkspacePlan::TopKKeyBytes(block.num_rows, block.top_k);
    return reinterpret_cast<kernels::TileSums*>(workspace_.arena.get() + offset);
  }

  uint64_t* TopKKeys(const CudaBlock& /*block*/) const override {
    return reinterpret_cast<uint64_t*>(workspace_.arena.get());
  }

  absl::Status EnqueueTargetLogits(const CudaBlock& block, cudaStream_t stream) override {
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchListedLogits({.partials = Params(block),
                                                               .ids = block.targets,
                                                               .count = block.num_rows,
                                                               .logits = workspace_.target_logits},
                                                              stream));
    return absl::OkStatus();
  }

  absl::Status EnqueuePartials(const CudaBlock& block, cudaStream_t stream) override {
    const kernels::FusedPartialsParams params = Params(block);
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchFusedPartials(params, stream));
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchListedLogits({.partials = params,
                                     .rows = block.candidate_rows,
                                     .ids = block.candidate_ids,
                                     .row_begin = static_cast<int32_t>(block.row_begin),
                                     .count = block.num_candidates,
                                     .logits = block.candidate_logprobs},
                                    stream));
    return absl::OkStatus();
  }

  absl::Status EnqueueTopK(const CudaBlock& block, cudaStream_t stream) override {
    auto* const scratch = reinterpret_cast<std::byte*>(Sums(block));
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchFusedTopK(
        {.partials = Params(block),
         .top_k = block.top_k,
         .keys = TopKKeys(block),
         .workspace = scratch,
         .workspace_bytes = workspace_.arena.get() + plan_.arena_bytes - scratch},
        stream));
    return absl::OkStatus();
  }

 private:
  float* TileMax(const CudaBlock& block) const {
    if (block.top_k == 0) return nullptr;
    const int64_t num_sums = block.entropy_log2_scales == nullptr ? 1 : 2;
    return reinterpret_cast<float*>(Sums(block) + num_sums * plan_.num_tiles * block.num_rows);
  }

  kernels::FusedPartialsParams Params(const CudaBlock& block) const {
    const bool is_split = plan_.ProductFormOf(block.hidden_dtype) == ProductForm::kBf16Split;
    kernels::FusedPartialsParams params;
    params.dtype = plan_.head_dtype;
    params.num_rows = block.num_rows;
    params.readable_rows = plan_.HiddenRows(block.hidden_dtype);
    params.hidden_size = plan_.padded_hidden;
    params.num_splits = is_split ? kernels::kHiddenSplits : 1;
    params.hidden = block.hidden;
    params.hidden_stride =
        plan_.MultipliedRowBytes(block.hidden_dtype) / kernels::DtypeBytes(plan_.head_dtype);
    params.weight = workspace_.head->weight.get();
    params.weight_stride = plan_.padded_hidden;
    params.vocab_size = plan_.vocab_size;
    params.tile_begin = plan_.tile_begin;
    params.tile_end = plan_.tile_begin + plan_.num_tiles;
    params.transform = workspace_.Transform(block.hidden_dtype).transform;
    params.bias = workspace_.bias();
    params.log2_scales = block.log2_scales;
    params.entropy_log2_scales = block.entropy_log2_scales;
    params.targets = block.targets;
    params.layout = kernels::PartialLayoutOf(block.num_rows, plan_.num_tiles);
    params.sums = Sums(block);
    params.entropy_sums = workspace_.EntropySums(block, params.sums);
    params.wants_sum_squares = block.scores.sum_p_squared != nullptr;
    params.target_logits = workspace_.target_logits;
    params.max_keys = workspace_.MaxKeys(block);
    params.min_keys = workspace_.MinKeys(block);
    params.rank_counts = workspace_.RankCounts(block);
    params.tile_max = TileMax(block);
    return params;
  }

  const CudaWorkspace& workspace_;
  const WorkspacePlan& plan_;
  const kernels::FusedArch arch_ = kernels::FusedArchOfCurrentDevice();
};

}  // namespace

std::unique_ptr<ScorePath> CreateFusedPath(const CudaWorkspace& workspace) {
  return std::make_unique<FusedPath>(workspace);
}

}  // namespace logprobd
