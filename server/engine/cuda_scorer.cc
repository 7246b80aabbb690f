#include "server/engine/cuda_scorer.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/chunked/convert_elements.h"
#include "kernels/chunked/logit_chunk.h"
#include "kernels/combine/list_scores.h"
#include "kernels/combine/peer_scores.h"
#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"
#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_top_k.h"
#include "kernels/fused_sm90/listed_logits.h"
#include "server/base/errors.h"
#include "server/engine/cuda_status.h"

namespace logprobd {
namespace {

using kernels::ChunkPlan;
using kernels::kRowGranularity;
using kernels::kTileColumns;

/// Compute capability (major) of the GPUs whose truncation was measured.
constexpr int kMeasuredTruncation = 9;

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
  std::unique_ptr<CudaScorer> scorer(new CudaScorer(plan, std::move(head)));
  CudaGemm::Options options;
  options.dtype = plan.head_dtype;
  options.depth = plan.padded_hidden;
  options.algorithm_index = algorithm_index;
  if (plan.head_dtype == kernels::Dtype::kF32) {
    options.shapes =
        ShapesOf(plan, {kernels::Dtype::kF32, kernels::Dtype::kBf16, kernels::Dtype::kF16});
    LOGPROBD_ASSIGN_OR_RETURN(scorer->native_, CudaGemm::Create(options));
  } else {
    options.shapes = ShapesOf(plan, {plan.head_dtype});
    LOGPROBD_ASSIGN_OR_RETURN(scorer->native_, CudaGemm::Create(options));
    const bool has_splits = plan.PairOf(kernels::Dtype::kF32) == ChunkPlan::Pair::kTerms;
    const kernels::Dtype other =
        plan.head_dtype == kernels::Dtype::kBf16 ? kernels::Dtype::kF16 : kernels::Dtype::kBf16;
    options.dtype = has_splits ? kernels::Dtype::kBf16 : kernels::Dtype::kF32;
    options.depth = has_splits ? kernels::SplitPitch(plan.hidden_size) * kernels::kHiddenSplits
                               : plan.padded_hidden;
    options.shapes = ShapesOf(plan, {kernels::Dtype::kF32, other});
    options.algorithm_index = 0;
    LOGPROBD_ASSIGN_OR_RETURN(scorer->mixed_, CudaGemm::Create(options));
  }
  int device = 0;
  int major = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  scorer->truncates_ = major == kMeasuredTruncation;
  LOGPROBD_RETURN_IF_ERROR(scorer->Allocate());
  return scorer;
}

absl::Status CudaScorer::Allocate() {
  LOGPROBD_ASSIGN_OR_RETURN(arena_, AllocateDevice(plan_.arena_bytes, "partials and logits"));
  LOGPROBD_ASSIGN_OR_RETURN(row_state_, AllocateDevice(plan_.row_state_bytes, "row states"));
  logits_ = reinterpret_cast<float*>(arena_.get() + plan_.partial_bytes);
  converted_weight_ = arena_.get() + plan_.partial_bytes + plan_.logits_bytes;
  normalizers_ = reinterpret_cast<kernels::RowNormalizer*>(row_state_.get());
  max_keys_ = reinterpret_cast<uint64_t*>(normalizers_ + plan_.row_state_rows);
  top_k_keys_ = max_keys_ + plan_.row_state_rows;
  target_logits_ = reinterpret_cast<float*>(top_k_keys_ + plan_.block_rows * plan_.top_k_max);
  min_keys_ = reinterpret_cast<uint32_t*>(target_logits_ + plan_.row_state_rows);
  if (plan_.num_shards > 1) {  // the rows are a multiple of two, so this is aligned
    row_sums_ = reinterpret_cast<int64_t*>(min_keys_ + plan_.row_state_rows);
    exponents_ =
        reinterpret_cast<int32_t*>(row_sums_ + kernels::kSharedSumFields * plan_.row_state_rows);
  }
  return absl::OkStatus();
}

ScorePath CudaScorer::PathOf(kernels::Dtype hidden_dtype) const {
  return plan_.with_fused && plan_.UsesTensorCores(hidden_dtype) ? ScorePath::kFused
                                                                 : ScorePath::kChunked;
}

double CudaScorer::DotCorrection(kernels::Dtype hidden_dtype) const {
  return truncates_ && plan_.UsesTensorCores(hidden_dtype)
             ? kernels::TruncationCorrection(plan_.hidden_size)
             : 1.0;
}

double CudaScorer::Correction(kernels::Dtype hidden_dtype) const {
  return head_->has_transform() ? 1.0 : DotCorrection(hidden_dtype);
}

kernels::LogitTransform CudaScorer::Transform(kernels::Dtype hidden_dtype) const {
  kernels::LogitTransform transform = head_->transform;
  if (head_->has_transform()) {
    transform.scale =
        static_cast<float>(static_cast<double>(transform.scale) * DotCorrection(hidden_dtype));
  }
  return transform;
}

int64_t CudaScorer::BlockRows(ScorePath path, kernels::Dtype hidden_dtype, bool has_entropy_scales,
                              int32_t top_k) const {
  return path == ScorePath::kFused
             ? plan_.FusedRows(hidden_dtype, has_entropy_scales ? 2 : 1, top_k)
             : plan_.BlockRows(hidden_dtype);
}

int64_t CudaScorer::RowStep(int64_t num_rows) const {
  if (PathOf(plan_.head_dtype) != ScorePath::kFused) return 1;
  const int64_t block_rows = BlockRows(ScorePath::kFused, plan_.head_dtype,
                                       /*has_entropy_scales=*/false, /*top_k=*/0);
  return kernels::FusedRowStep({.num_rows = std::min(num_rows, block_rows),
                                .num_tiles = plan_.num_tiles,
                                .depth = plan_.padded_hidden});
}

int64_t CudaScorer::HiddenOffset(kernels::Dtype hidden_dtype) const {
  return plan_.SourceRowBytes(hidden_dtype) == 0
             ? 0
             : plan_.HiddenRows(hidden_dtype) * plan_.MultipliedRowBytes(hidden_dtype);
}

uint64_t* CudaScorer::TopKKeys(const CudaBlock& block) const {
  return block.path == ScorePath::kFused ? reinterpret_cast<uint64_t*>(arena_.get()) : top_k_keys_;
}

kernels::TileSums* CudaScorer::Sums(const CudaBlock& block) const {
  const int64_t offset =
      block.path == ScorePath::kFused ? ChunkPlan::FusedKeyBytes(block.num_rows, block.top_k) : 0;
  return reinterpret_cast<kernels::TileSums*>(arena_.get() + offset);
}

kernels::TileSums* CudaScorer::EntropySums(const CudaBlock& block) const {
  return block.entropy_log2_scales == nullptr ? nullptr
                                              : Sums(block) + plan_.num_tiles * block.num_rows;
}

float* CudaScorer::TileMax(const CudaBlock& block) const {
  if (block.top_k == 0) return nullptr;
  const int64_t num_sums = block.entropy_log2_scales == nullptr ? 1 : 2;
  return reinterpret_cast<float*>(Sums(block) + num_sums * plan_.num_tiles * block.num_rows);
}

uint64_t* CudaScorer::MaxKeys(const CudaBlock& block) const {
  const kernels::RowScoresParams& scores = block.scores;
  const bool wants = scores.argmax_id != nullptr || scores.argmax_logprob != nullptr ||
                     scores.max_logit != nullptr;
  return wants ? max_keys_ : nullptr;
}

uint32_t* CudaScorer::MinKeys(const CudaBlock& block) const {
  return block.scores.min_logit != nullptr ? min_keys_ : nullptr;
}

absl::Status CudaScorer::EnqueuePartials(const CudaBlock& block, cudaStream_t stream) {
  LOGPROBD_RETURN_IF_ERROR(EnqueueConversion(block, stream));
  const auto num_rows = static_cast<size_t>(block.num_rows);
  if (uint64_t* const max_keys = MaxKeys(block)) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(max_keys, 0, num_rows * sizeof(uint64_t), stream));
  }
  if (uint32_t* const min_keys = MinKeys(block)) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(min_keys, 0, num_rows * sizeof(uint32_t), stream));
  }
  if (plan_.num_shards > 1) {  // what a shard does not hold adds nothing
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(target_logits_, 0, num_rows * sizeof(float), stream));
    if (block.num_candidates > 0) {
      LOGPROBD_RETURN_IF_CUDA_ERROR(
          cudaMemsetAsync(block.candidate_logprobs, 0,
                          static_cast<size_t>(block.num_candidates) * sizeof(float), stream));
    }
  }
  if (block.path == ScorePath::kFused) return EnqueueFused(block, stream);
  if (block.top_k > 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(TopKKeys(block), 0,
                        num_rows * static_cast<size_t>(block.top_k) * sizeof(uint64_t), stream));
  }
  const int64_t chunk_tiles = plan_.ChunkTiles(block.hidden_dtype, block.num_rows);
  for (int64_t tile = 0; tile < plan_.num_tiles; tile += chunk_tiles) {
    LOGPROBD_RETURN_IF_ERROR(
        EnqueueChunk(block, tile, std::min(chunk_tiles, plan_.num_tiles - tile), stream));
  }
  return absl::OkStatus();
}

absl::Status CudaScorer::EnqueueConversion(const CudaBlock& block, cudaStream_t stream) {
  const int64_t offset = HiddenOffset(block.hidden_dtype);
  if (offset == 0) return absl::OkStatus();
  const std::byte* const source = block.hidden + offset;
  if (plan_.PairOf(block.hidden_dtype) == ChunkPlan::Pair::kTerms) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchBf16Split({.dtype = block.hidden_dtype,
                                                            .in = source,
                                                            .in_stride = plan_.padded_hidden,
                                                            .num_rows = block.num_rows,
                                                            .hidden_size = plan_.hidden_size,
                                                            .out = block.hidden},
                                                           stream));
  } else {
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchWiden(
        source, block.hidden_dtype, kernels::PadRows(block.num_rows) * plan_.padded_hidden,
        reinterpret_cast<float*>(block.hidden), stream));
  }
  return absl::OkStatus();
}

kernels::FusedPartialsParams CudaScorer::FusedParams(const CudaBlock& block) const {
  const bool has_splits = plan_.PairOf(block.hidden_dtype) == ChunkPlan::Pair::kTerms;
  kernels::FusedPartialsParams params;
  params.dtype = plan_.head_dtype;
  params.num_rows = block.num_rows;
  params.readable_rows = plan_.HiddenRows(block.hidden_dtype);
  params.hidden_size = plan_.padded_hidden;
  params.num_splits = has_splits ? kernels::kHiddenSplits : 1;
  params.hidden = block.hidden;
  params.hidden_stride =
      plan_.MultipliedRowBytes(block.hidden_dtype) / kernels::DtypeBytes(plan_.head_dtype);
  params.weight = head_->weight.get();
  params.weight_stride = plan_.padded_hidden;
  params.vocab_size = plan_.vocab_size;
  params.tile_begin = plan_.tile_begin;
  params.tile_end = plan_.tile_begin + plan_.num_tiles;
  params.transform = Transform(block.hidden_dtype);
  params.bias = bias();
  params.log2_scales = block.log2_scales;
  params.entropy_log2_scales = block.entropy_log2_scales;
  params.targets = block.targets;
  params.layout = kernels::PartialLayoutOf(block.num_rows, plan_.num_tiles);
  params.sums = Sums(block);
  params.entropy_sums = EntropySums(block);
  params.wants_sum_squares = block.scores.sum_p_squared != nullptr;
  params.target_logits = target_logits_;
  params.max_keys = MaxKeys(block);
  params.min_keys = MinKeys(block);
  params.tile_max = TileMax(block);
  return params;
}

absl::Status CudaScorer::EnqueueFused(const CudaBlock& block, cudaStream_t stream) {
  const kernels::FusedPartialsParams params = FusedParams(block);
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

absl::Status CudaScorer::EnqueueFusedTopK(const CudaBlock& block, cudaStream_t stream) {
  auto* const scratch = reinterpret_cast<std::byte*>(Sums(block));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      kernels::LaunchFusedTopK({.partials = FusedParams(block),
                                .top_k = block.top_k,
                                .keys = TopKKeys(block),
                                .workspace = scratch,
                                .workspace_bytes = arena_.get() + plan_.arena_bytes - scratch},
                               stream));
  return absl::OkStatus();
}

absl::StatusOr<const std::byte*> CudaScorer::EnqueueWeight(kernels::Dtype hidden_dtype,
                                                           int64_t tile, int64_t num_tiles,
                                                           cudaStream_t stream) {
  const int64_t columns = num_tiles * kTileColumns;
  const auto row_bytes =
      static_cast<size_t>(plan_.padded_hidden * kernels::DtypeBytes(plan_.head_dtype));
  const std::byte* const weight =
      head_->weight.get() + static_cast<size_t>(tile * kTileColumns) * row_bytes;
  if (!plan_.ConvertsWeight(hidden_dtype)) return weight;
  if (plan_.PairOf(hidden_dtype) == ChunkPlan::Pair::kWidened) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchWiden(weight, plan_.head_dtype, columns * plan_.padded_hidden,
                             reinterpret_cast<float*>(converted_weight_), stream));
    return converted_weight_;
  }
  // The weight's rows once for each term, with zeros up to the next.
  const auto split_bytes = static_cast<size_t>(kernels::SplitPitch(plan_.hidden_size)) * 2;
  const size_t pitch = split_bytes * kernels::kHiddenSplits;
  for (size_t term = 0; term < kernels::kHiddenSplits; ++term) {
    std::byte* const out = converted_weight_ + term * split_bytes;
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(out, pitch, weight, row_bytes, row_bytes,
                                                    static_cast<size_t>(columns),
                                                    cudaMemcpyDeviceToDevice, stream));
    if (split_bytes > row_bytes) {
      LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemset2DAsync(out + row_bytes, pitch, 0,
                                                      split_bytes - row_bytes,
                                                      static_cast<size_t>(columns), stream));
    }
  }
  return converted_weight_;
}

absl::Status CudaScorer::EnqueueChunk(const CudaBlock& block, int64_t tile, int64_t num_tiles,
                                      cudaStream_t stream) {
  const int64_t columns = num_tiles * kTileColumns;
  LOGPROBD_ASSIGN_OR_RETURN(const std::byte* const weight,
                            EnqueueWeight(block.hidden_dtype, tile, num_tiles, stream));
  LOGPROBD_RETURN_IF_ERROR((plan_.ConvertsWeight(block.hidden_dtype) ? mixed_ : native_)
                               ->Run(weight, block.hidden,
                                     {.columns = columns, .rows = kernels::PadRows(block.num_rows)},
                                     logits_, stream));
  const kernels::LogitChunk chunk = {.dots = logits_,
                                     .row_stride = columns,
                                     .num_rows = block.num_rows,
                                     .tile_begin = plan_.tile_begin + tile,
                                     .num_tiles = num_tiles,
                                     .vocab_size = plan_.vocab_size,
                                     .transform = Transform(block.hidden_dtype),
                                     .bias = bias()};
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      kernels::LaunchTileStats({.chunk = chunk,
                                .log2_scales = block.log2_scales,
                                .entropy_log2_scales = block.entropy_log2_scales,
                                .targets = block.targets,
                                .tile_origin = plan_.tile_begin,
                                .layout = kernels::PartialLayoutOf(block.num_rows, plan_.num_tiles),
                                .sums = Sums(block),
                                .entropy_sums = EntropySums(block),
                                .wants_sum_squares = block.scores.sum_p_squared != nullptr,
                                .target_logits = target_logits_,
                                .max_keys = MaxKeys(block),
                                .min_keys = MinKeys(block)},
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

kernels::RowScoresParams CudaScorer::RowScores(const CudaBlock& block) const {
  kernels::RowScoresParams scores = block.scores;
  scores.num_rows = block.num_rows;
  scores.num_tiles = plan_.num_tiles;
  scores.vocab_size = plan_.vocab_size;
  scores.layout = kernels::PartialLayoutOf(block.num_rows, plan_.num_tiles);
  scores.sums = Sums(block);
  scores.entropy_sums = EntropySums(block);
  scores.max_keys = MaxKeys(block);
  scores.min_keys = MinKeys(block);
  scores.log2_scales = block.log2_scales;
  scores.logit_correction = static_cast<float>(Correction(block.hidden_dtype));
  scores.target_logits = target_logits_;
  scores.normalizers = normalizers_;
  return scores;
}

absl::Status CudaScorer::EnqueueScores(const CudaBlock& block, cudaStream_t stream) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchRowScores(RowScores(block), stream));
  if (block.top_k > 0 && block.path == ScorePath::kFused) {
    LOGPROBD_RETURN_IF_ERROR(EnqueueFusedTopK(block, stream));
  }
  return EnqueueListScores(block, stream);
}

absl::Status CudaScorer::EnqueueShardScores(const CudaBlock& block, int32_t rank,
                                            Collective& collective, cudaStream_t stream) {
  // Few rows in one kernel, where that can be.
  std::optional<kernels::PeerStep> step;
  if (block.num_rows <= kernels::kPeerScoresRowsMax) step = collective.TakePeerStep(rank);
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
                                      .exponents = exponents_,
                                      .row_sums = row_sums_},
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
  const kernels::ShardSumsParams sums = {
      .num_rows = block.num_rows,
      .num_tiles = plan_.num_tiles,
      .layout = kernels::PartialLayoutOf(block.num_rows, plan_.num_tiles),
      .sums = Sums(block),
      .entropy_sums = EntropySums(block),
      .wants_sum_squares = block.scores.sum_p_squared != nullptr,
      .exponents = exponents_,
      .row_sums = row_sums_};
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchShardExponents(sums, stream));
  const Reduction maxima[] = {
      {exponents_, kernels::NumSumSets(has_entropy_sums) * block.num_rows,
       ReductionType::kMaxInt32},
      {max_keys_, MaxKeys(block) != nullptr ? block.num_rows : 0, ReductionType::kMaxUint64},
      {min_keys_, MinKeys(block) != nullptr ? block.num_rows : 0, ReductionType::kMaxUint32}};
  LOGPROBD_RETURN_IF_ERROR(collective.AllReduce(rank, maxima, stream));
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchShardSums(sums, stream));
  const Reduction added[] = {
      {row_sums_, kernels::NumSumFields(sums.wants_sum_squares, has_entropy_sums) * block.num_rows,
       ReductionType::kSumInt64},
      {target_logits_, block.num_rows, ReductionType::kSumInt32},
      {block.candidate_logprobs, block.num_candidates, ReductionType::kSumInt32}};
  return collective.AllReduce(rank, added, stream);
}

absl::Status CudaScorer::EnqueueShardTopK(const CudaBlock& block, int32_t rank,
                                          Collective& collective, cudaStream_t stream) {
  if (block.path == ScorePath::kFused) LOGPROBD_RETURN_IF_ERROR(EnqueueFusedTopK(block, stream));
  // The partials and the search's scratch are done with.
  auto* const gathered = reinterpret_cast<uint64_t*>(Sums(block));
  uint64_t* const keys = TopKKeys(block);
  LOGPROBD_RETURN_IF_ERROR(
      collective.Gather(rank, keys, block.num_rows * block.top_k, gathered, stream));
  if (rank != 0) return absl::OkStatus();
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchMergeTopK({.num_rows = block.num_rows,
                                                          .top_k = block.top_k,
                                                          .num_shards = plan_.num_shards,
                                                          .gathered = gathered,
                                                          .keys = keys},
                                                         stream));
  return absl::OkStatus();
}

absl::Status CudaScorer::EnqueueListScores(const CudaBlock& block, cudaStream_t stream) {
  if (block.top_k > 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchTopKScores({.num_rows = block.num_rows,
                                                             .top_k = block.top_k,
                                                             .keys = TopKKeys(block),
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
