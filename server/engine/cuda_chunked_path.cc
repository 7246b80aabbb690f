#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "kernels/chunked/convert_elements.h"
#include "kernels/chunked/logit_chunk.h"
#include "kernels/common/dtype.h"
#include "kernels/common/tile.h"
#include "server/base/errors.h"
#include "server/engine/cuda_gemm.h"
#include "server/engine/cuda_score_path.h"

namespace logprobd {
namespace {

using kernels::kTileColumns;

/// Returns every GEMM shape that blocks of these hidden dtypes can need.
std::vector<CudaGemm::Shape> ShapesOf(const WorkspacePlan& plan,
                                      std::initializer_list<kernels::Dtype> hidden_dtypes) {
  std::vector<CudaGemm::Shape> shapes;
  for (const kernels::Dtype dtype : hidden_dtypes) {
    for (int64_t rows = kRowGranularity; rows <= plan.BlockRows(dtype); rows += kRowGranularity) {
      const int64_t tiles = plan.ChunkTiles(dtype, rows);
      shapes.push_back({.columns = tiles * kTileColumns, .rows = rows});
      if (plan.num_tiles % tiles != 0) {
        shapes.push_back({.columns = plan.num_tiles % tiles * kTileColumns, .rows = rows});
      }
      shapes.push_back({.columns = rows, .rows = rows});  // EnqueueTargetLogits
    }
  }
  return shapes;
}

/// Implements the chunked path. The arena holds the partials (at both temperatures), one chunk of
/// logits and one chunk of the converted weight, in this order.
class ChunkedPathImpl final : public ScorePath {
 public:
  explicit ChunkedPathImpl(const CudaWorkspace& workspace)
      : workspace_(workspace),
        plan_(workspace.plan),
        logits_(reinterpret_cast<float*>(workspace.arena.get() + plan_.partial_bytes)),
        converted_weight_(workspace.arena.get() + plan_.partial_bytes + plan_.logits_bytes) {}

  absl::Status CreateGemms(int algorithm_index);
  const std::string& algorithm() const { return native_->description(); }

  int64_t BlockRows(kernels::Dtype hidden_dtype, bool /*has_entropy_scales*/,
                    int32_t /*top_k*/) const override {
    return plan_.BlockRows(hidden_dtype);
  }

  int64_t RowStep(int64_t /*num_rows*/) const override { return 1; }

  kernels::TileSums* Sums(const CudaBlock& /*block*/) const override {
    return reinterpret_cast<kernels::TileSums*>(workspace_.arena.get());
  }

  uint64_t* TopKKeys(const CudaBlock& /*block*/) const override {
    return workspace_.chunked_top_k_keys;
  }

  absl::Status EnqueueTargetLogits(const CudaBlock& block, cudaStream_t stream) override;
  absl::Status EnqueuePartials(const CudaBlock& block, cudaStream_t stream) override;

  /// Does nothing, because EnqueuePartials has already completed the keys.
  absl::Status EnqueueTopK(const CudaBlock& /*block*/, cudaStream_t /*stream*/) override {
    return absl::OkStatus();
  }

 private:
  absl::Status EnqueueChunk(const CudaBlock& block, int64_t tile, int64_t num_tiles,
                            cudaStream_t stream);

  /// Returns `columns` rows of the weight in the form in which they are multiplied, and enqueues
  /// the conversion to `converted` if one is needed.
  absl::StatusOr<const std::byte*> EnqueueWeight(kernels::Dtype hidden_dtype,
                                                 const std::byte* weight, int64_t columns,
                                                 std::byte* converted, cudaStream_t stream);

  const CudaGemm& GemmOf(kernels::Dtype hidden_dtype) const {
    return plan_.ConvertsWeight(hidden_dtype) ? *mixed_ : *native_;
  }

  /// Bytes from one row of the stored weight to the next.
  size_t weight_row_bytes() const {
    return static_cast<size_t>(plan_.padded_hidden * kernels::DtypeBytes(plan_.head_dtype));
  }

  const CudaWorkspace& workspace_;
  const WorkspacePlan& plan_;
  float* const logits_;
  std::byte* const converted_weight_;
  /// Multiplies hidden rows of the head's dtype, and all hidden rows for an fp32 head.
  std::unique_ptr<CudaGemm> native_;
  /// Multiplies all other hidden rows, as bf16 splits or widened to fp32; null for an fp32 head.
  std::unique_ptr<CudaGemm> mixed_;
};

absl::Status ChunkedPathImpl::CreateGemms(int algorithm_index) {
  CudaGemm::Options options;
  options.dtype = plan_.head_dtype;
  options.depth = plan_.padded_hidden;
  options.algorithm_index = algorithm_index;
  if (plan_.head_dtype == kernels::Dtype::kF32) {
    options.shapes =
        ShapesOf(plan_, {kernels::Dtype::kF32, kernels::Dtype::kBf16, kernels::Dtype::kF16});
    LOGPROBD_ASSIGN_OR_RETURN(native_, CudaGemm::Create(options));
    return absl::OkStatus();
  }
  options.shapes = ShapesOf(plan_, {plan_.head_dtype});
  LOGPROBD_ASSIGN_OR_RETURN(native_, CudaGemm::Create(options));
  const bool is_split = plan_.ProductFormOf(kernels::Dtype::kF32) == ProductForm::kBf16Split;
  const kernels::Dtype other =
      plan_.head_dtype == kernels::Dtype::kBf16 ? kernels::Dtype::kF16 : kernels::Dtype::kBf16;
  options.dtype = is_split ? kernels::Dtype::kBf16 : kernels::Dtype::kF32;
  options.depth = is_split ? kernels::SplitPitch(plan_.hidden_size) * kernels::kHiddenSplits
                           : plan_.padded_hidden;
  options.shapes = ShapesOf(plan_, {kernels::Dtype::kF32, other});
  options.algorithm_index = 0;
  LOGPROBD_ASSIGN_OR_RETURN(mixed_, CudaGemm::Create(options));
  return absl::OkStatus();
}

absl::Status ChunkedPathImpl::EnqueuePartials(const CudaBlock& block, cudaStream_t stream) {
  if (block.top_k > 0) {
    const size_t num_keys = static_cast<size_t>(block.num_rows) * static_cast<size_t>(block.top_k);
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(TopKKeys(block), 0, num_keys * sizeof(uint64_t), stream));
  }
  const int64_t chunk_tiles = plan_.ChunkTiles(block.hidden_dtype, block.num_rows);
  for (int64_t tile = 0; tile < plan_.num_tiles; tile += chunk_tiles) {
    LOGPROBD_RETURN_IF_ERROR(
        EnqueueChunk(block, tile, std::min(chunk_tiles, plan_.num_tiles - tile), stream));
  }
  return absl::OkStatus();
}

absl::Status ChunkedPathImpl::EnqueueTargetLogits(const CudaBlock& block, cudaStream_t stream) {
  // As many rows at a time as the arena has room for.
  int64_t group_rows = PadRows(block.num_rows);
  while (group_rows > kRowGranularity &&
         plan_.TargetProductOf(block.hidden_dtype, group_rows).bytes > plan_.arena_bytes) {
    group_rows -= kRowGranularity;
  }
  std::byte* const arena = workspace_.arena.get();
  for (int64_t row = 0; row < block.num_rows; row += group_rows) {
    kernels::TargetLogitsParams params;
    params.targets = {.targets = block.targets + row,
                      .num_rows = std::min(group_rows, block.num_rows - row),
                      .column_begin = plan_.tile_begin * kTileColumns,
                      .column_end = std::min((plan_.tile_begin + plan_.num_tiles) * kTileColumns,
                                             plan_.vocab_size)};
    const int64_t rows = PadRows(params.targets.num_rows);
    const TargetProduct product = plan_.TargetProductOf(block.hidden_dtype, rows);
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchGatherWeight(params.targets, workspace_.head->weight.get(),
                                    static_cast<int64_t>(weight_row_bytes()), arena, stream));
    LOGPROBD_ASSIGN_OR_RETURN(
        const std::byte* const weight,
        EnqueueWeight(block.hidden_dtype, arena, rows, arena + product.converted_offset, stream));
    auto* const dots = reinterpret_cast<float*>(arena + product.dots_offset);
    LOGPROBD_RETURN_IF_ERROR(
        GemmOf(block.hidden_dtype)
            .Run(weight, block.hidden + row * plan_.MultipliedRowBytes(block.hidden_dtype),
                 {.columns = rows, .rows = rows}, dots, stream));
    params.dots = dots;
    params.row_stride = rows;
    params.transform = workspace_.Transform(block.hidden_dtype).transform;
    params.bias = workspace_.bias();
    params.logits = workspace_.target_logits + row;
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchTargetLogits(params, stream));
  }
  return absl::OkStatus();
}

absl::StatusOr<const std::byte*> ChunkedPathImpl::EnqueueWeight(kernels::Dtype hidden_dtype,
                                                                const std::byte* weight,
                                                                int64_t columns,
                                                                std::byte* converted,
                                                                cudaStream_t stream) {
  const size_t row_bytes = weight_row_bytes();
  if (!plan_.ConvertsWeight(hidden_dtype)) return weight;
  if (plan_.ProductFormOf(hidden_dtype) == ProductForm::kWidened) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchWiden(weight, plan_.head_dtype, columns * plan_.padded_hidden,
                             reinterpret_cast<float*>(converted), stream));
    return converted;
  }
  // Makes one copy of the weight's rows for each split of the hidden rows, padded with zeros.
  const auto split_bytes = static_cast<size_t>(kernels::SplitPitch(plan_.hidden_size)) * 2;
  const size_t pitch = split_bytes * kernels::kHiddenSplits;
  for (size_t split = 0; split < kernels::kHiddenSplits; ++split) {
    std::byte* const out = converted + split * split_bytes;
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(out, pitch, weight, row_bytes, row_bytes,
                                                    static_cast<size_t>(columns),
                                                    cudaMemcpyDeviceToDevice, stream));
    if (split_bytes > row_bytes) {
      LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemset2DAsync(out + row_bytes, pitch, 0,
                                                      split_bytes - row_bytes,
                                                      static_cast<size_t>(columns), stream));
    }
  }
  return converted;
}

absl::Status ChunkedPathImpl::EnqueueChunk(const CudaBlock& block, int64_t tile, int64_t num_tiles,
                                           cudaStream_t stream) {
  const int64_t columns = num_tiles * kTileColumns;
  LOGPROBD_ASSIGN_OR_RETURN(
      const std::byte* const weight,
      EnqueueWeight(block.hidden_dtype,
                    workspace_.head->weight.get() +
                        static_cast<size_t>(tile * kTileColumns) * weight_row_bytes(),
                    columns, converted_weight_, stream));
  LOGPROBD_RETURN_IF_ERROR(GemmOf(block.hidden_dtype)
                               .Run(weight, block.hidden,
                                    {.columns = columns, .rows = PadRows(block.num_rows)}, logits_,
                                    stream));
  const kernels::LogitChunk chunk = {
      .dots = logits_,
      .row_stride = columns,
      .num_rows = block.num_rows,
      .tile_begin = plan_.tile_begin + tile,
      .num_tiles = num_tiles,
      .vocab_size = plan_.vocab_size,
      .transform = workspace_.Transform(block.hidden_dtype).transform,
      .bias = workspace_.bias()};
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      kernels::LaunchTileStats({.chunk = chunk,
                                .log2_scales = block.log2_scales,
                                .entropy_log2_scales = block.entropy_log2_scales,
                                .targets = block.targets,
                                .tile_origin = plan_.tile_begin,
                                .layout = kernels::PartialLayoutOf(block.num_rows, plan_.num_tiles),
                                .sums = Sums(block),
                                .entropy_sums = workspace_.EntropySums(block, Sums(block)),
                                .wants_sum_squares = block.scores.sum_p_squared != nullptr,
                                .target_logits = workspace_.target_logits,
                                .max_keys = workspace_.MaxKeys(block),
                                .min_keys = workspace_.MinKeys(block),
                                .rank_counts = workspace_.RankCounts(block)},
                               stream));
  if (block.top_k > 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchTopK(
        {.chunk = chunk, .top_k = block.top_k, .keys = TopKKeys(block)}, stream));
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      kernels::LaunchGatherLogits({.chunk = chunk,
                                   .rows = block.candidate_rows,
                                   .ids = block.candidate_ids,
                                   .row_begin = static_cast<int32_t>(block.row_begin),
                                   .count = block.num_candidates,
                                   .logits = block.candidate_logprobs},
                                  stream));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ChunkedPath> CreateChunkedPath(const CudaWorkspace& workspace, int algorithm_index) {
  auto path = std::make_unique<ChunkedPathImpl>(workspace);
  LOGPROBD_RETURN_IF_ERROR(path->CreateGemms(algorithm_index));
  ChunkedPath chunked;
  chunked.algorithm = path->algorithm();
  chunked.path = std::move(path);
  return chunked;
}

}  // namespace logprobd
