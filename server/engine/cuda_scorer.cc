#include "server/engine/cuda_scorer.h"

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "kernels/chunked/gather_logits.h"
#include "kernels/chunked/tile_stats.h"
#include "kernels/chunked/top_k.h"
#include "kernels/chunked/widen.h"
#include "kernels/combine/list_scores.h"
#include "kernels/common/tile.h"
#include "server/base/errors.h"
#include "server/engine/cuda_status.h"

namespace logprobd {
namespace {

using kernels::ChunkPlan;
using kernels::kRowGranularity;
using kernels::kTileColumns;

/// Every shape that blocks of these hidden dtypes can ask for.
std::vector<CudaGemm::Shape> ShapesOf(const ChunkPlan& plan,
                                      std::initializer_list<kernels::Dtype> hidden_dtypes) {
  std::vector<CudaGemm::Shape> shapes;
  for (const kernels::Dtype dtype : hidden_dtypes) {
    for (int64_t rows = kRowGranularity; rows <= plan.BlockRows(dtype); rows += kRowGranularity) {
      const int64_t tiles = plan.ChunkTiles(dtype, rows);
      shapes.push_back({.columns = tiles * kTileColumns, .rows = rows});
      if (plan.num_tiles % tiles != 0) {
        shapes.push_back({.columns = plan.num_tiles % tiles * kTileColumns, .rows = rows});
      }
    }
  }
  return shapes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaScorer>> CudaScorer::Create(const ChunkPlan& plan,
                                                               std::shared_ptr<const CudaHead> head,
                                                               int algorithm_index) {
  using kernels::Dtype;
  std::unique_ptr<CudaScorer> scorer(new CudaScorer(plan, std::move(head)));
  CudaGemm::Options options;
  options.dtype = plan.head_dtype;
  options.depth = plan.padded_hidden;
  options.algorithm_index = algorithm_index;
  if (plan.head_dtype == Dtype::kF32) {
    options.shapes = ShapesOf(plan, {Dtype::kF32, Dtype::kBf16, Dtype::kF16});
    LOGPROBD_ASSIGN_OR_RETURN(scorer->native_, CudaGemm::Create(options));
  } else {
    options.shapes = ShapesOf(plan, {plan.head_dtype});
    LOGPROBD_ASSIGN_OR_RETURN(scorer->native_, CudaGemm::Create(options));
    const Dtype other = plan.head_dtype == Dtype::kBf16 ? Dtype::kF16 : Dtype::kBf16;
    options.dtype = Dtype::kF32;
    options.shapes = ShapesOf(plan, {Dtype::kF32, other});
    options.algorithm_index = 0;
    LOGPROBD_ASSIGN_OR_RETURN(scorer->widened_, CudaGemm::Create(options));
  }
  LOGPROBD_RETURN_IF_ERROR(scorer->Allocate());
  return scorer;
}

absl::Status CudaScorer::Allocate() {
  LOGPROBD_ASSIGN_OR_RETURN(logits_, AllocateDevice(plan_.logits_bytes, "a chunk of logits"));
  LOGPROBD_ASSIGN_OR_RETURN(converted_weight_,
                            AllocateDevice(plan_.converted_weight_bytes, "widened weights"));
  LOGPROBD_ASSIGN_OR_RETURN(partials_, AllocateDevice(plan_.partial_bytes, "tile partials"));
  LOGPROBD_ASSIGN_OR_RETURN(row_state_, AllocateDevice(plan_.row_state_bytes, "row states"));
  const int64_t num_partials = plan_.block_rows * plan_.num_tiles;
  sums_ = reinterpret_cast<kernels::TileSums*>(partials_.get());
  entropy_sums_ = sums_ + num_partials;
  extremes_ = reinterpret_cast<kernels::TileExtremes*>(entropy_sums_ + num_partials);
  normalizers_ = reinterpret_cast<kernels::RowNormalizer*>(row_state_.get());
  top_k_keys_ = reinterpret_cast<uint64_t*>(normalizers_ + plan_.block_rows);
  target_logits_ = reinterpret_cast<float*>(top_k_keys_ + plan_.block_rows * plan_.top_k_max);
  return absl::OkStatus();
}

int64_t CudaScorer::HiddenOffset(kernels::Dtype hidden_dtype) const {
  // Rows of a mixed pair lie behind the space of their widened copies.
  const bool is_widened = !plan_.IsNativePair(hidden_dtype) && hidden_dtype != kernels::Dtype::kF32;
  return is_widened ? plan_.BlockRows(hidden_dtype) * plan_.padded_hidden * int64_t{sizeof(float)}
                    : 0;
}

bool CudaScorer::WantsExtremes(const CudaBlock& block) {
  const kernels::RowScoresParams& scores = block.scores;
  return scores.argmax_id != nullptr || scores.argmax_logprob != nullptr ||
         scores.max_logit != nullptr || scores.min_logit != nullptr;
}

absl::Status CudaScorer::EnqueuePartials(const CudaBlock& block, cudaStream_t stream) {
  const int64_t hidden_offset = HiddenOffset(block.hidden_dtype);
  const std::byte* hidden = block.hidden;
  if (hidden_offset != 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchWiden(block.hidden + hidden_offset, block.hidden_dtype,
                             kernels::PadRows(block.num_rows) * plan_.padded_hidden,
                             reinterpret_cast<float*>(block.hidden), stream));
  }
  if (block.top_k > 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(
        top_k_keys_, 0, static_cast<size_t>(block.num_rows * block.top_k) * sizeof(uint64_t),
        stream));
  }
  const int64_t chunk_tiles = plan_.ChunkTiles(block.hidden_dtype, block.num_rows);
  for (int64_t tile = 0; tile < plan_.num_tiles; tile += chunk_tiles) {
    LOGPROBD_RETURN_IF_ERROR(
        EnqueueChunk(block, hidden, tile, std::min(chunk_tiles, plan_.num_tiles - tile), stream));
  }
  return absl::OkStatus();
}

absl::Status CudaScorer::EnqueueChunk(const CudaBlock& block, const std::byte* hidden, int64_t tile,
                                      int64_t num_tiles, cudaStream_t stream) {
  const int64_t columns = num_tiles * kTileColumns;
  const int64_t weight_bytes = kernels::DtypeBytes(plan_.head_dtype);
  const void* weight =
      head_->weight.get() + tile * kTileColumns * plan_.padded_hidden * weight_bytes;
  const bool is_native =
      plan_.IsNativePair(block.hidden_dtype) || plan_.head_dtype == kernels::Dtype::kF32;
  if (!is_native) {
    auto* const converted = reinterpret_cast<float*>(converted_weight_.get());
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchWiden(
        weight, plan_.head_dtype, columns * plan_.padded_hidden, converted, stream));
    weight = converted;
  }
  auto* const logits = reinterpret_cast<float*>(logits_.get());
  LOGPROBD_RETURN_IF_ERROR((is_native ? native_ : widened_)
                               ->Run(weight, hidden,
                                     {.columns = columns, .rows = kernels::PadRows(block.num_rows)},
                                     logits, stream));
  const kernels::LogitChunk chunk = {.dots = logits,
                                     .row_stride = columns,
                                     .num_rows = block.num_rows,
                                     .tile_begin = tile,
                                     .num_tiles = num_tiles,
                                     .vocab_size = plan_.vocab_size,
                                     .transform = head_->transform,
                                     .bias = reinterpret_cast<const float*>(head_->bias.get())};
  const bool has_entropy_scales = block.entropy_log2_scales != nullptr;
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      kernels::LaunchTileStats({.chunk = chunk,
                                .log2_scales = block.log2_scales,
                                .entropy_log2_scales = block.entropy_log2_scales,
                                .targets = block.targets,
                                .partial_stride = plan_.num_tiles,
                                .target_logits = target_logits_,
                                .sums = sums_,
                                .entropy_sums = has_entropy_scales ? entropy_sums_ : nullptr,
                                .extremes = WantsExtremes(block) ? extremes_ : nullptr,
                                .wants_sum_squares = block.scores.sum_p_squared != nullptr},
                               stream));
  if (block.top_k > 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchTopK({.chunk = chunk, .top_k = block.top_k, .keys = top_k_keys_}, stream));
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

absl::Status CudaScorer::EnqueueScores(const CudaBlock& block, cudaStream_t stream) {
  kernels::RowScoresParams scores = block.scores;
  scores.num_rows = block.num_rows;
  scores.num_tiles = plan_.num_tiles;
  scores.vocab_size = plan_.vocab_size;
  scores.sums = sums_;
  scores.entropy_sums = block.entropy_log2_scales != nullptr ? entropy_sums_ : nullptr;
  scores.extremes = WantsExtremes(block) ? extremes_ : nullptr;
  scores.log2_scales = block.log2_scales;
  scores.target_logits = target_logits_;
  scores.normalizers = normalizers_;
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchRowScores(scores, stream));
  if (block.top_k > 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchTopKScores({.num_rows = block.num_rows,
                                                             .top_k = block.top_k,
                                                             .keys = top_k_keys_,
                                                             .normalizers = normalizers_,
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
       .normalizers = normalizers_,
       .log2_scales = block.log2_scales,
       .scores = block.candidate_logprobs},
      stream));
  return absl::OkStatus();
}

}  // namespace logprobd
