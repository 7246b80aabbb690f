#include "tests/bench/fused_fixture.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/chunked/convert_elements.h"
#include "kernels/combine/list_scores.h"
#include "kernels/combine/row_scores.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/listed_logits.h"
#include "kernels/fused/params.h"
#include "kernels/fused/top_k.h"
#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/workspace_plan.h"
#include "tests/bench/bench_kernels.h"

namespace logprobd::testing {
namespace {

using kernels::Dtype;
using kernels::kTileColumns;

/// Readable rows after the last one, so that every block tile is complete.
constexpr int64_t kSpareRows = 256;

}  // namespace

absl::StatusOr<std::unique_ptr<FusedFixture>> FusedFixture::Create(const Sizes& sizes) {
  std::unique_ptr<FusedFixture> fixture(new FusedFixture(sizes));
  LOGPROBD_RETURN_IF_ERROR(fixture->Allocate());
  LOGPROBD_RETURN_IF_ERROR(fixture->Fill());
  return fixture;
}

int64_t FusedFixture::AllRows() const { return sizes_.rows_max + kSpareRows; }

int64_t FusedFixture::weight_bytes() const {
  return kernels::NumTiles(sizes_.vocab_size) * kTileColumns * sizes_.hidden_size * 2;
}

absl::Status FusedFixture::Allocate() {
  const int64_t rows = AllRows();
  // The engine's launches have the most rows for the dtype with the shortest rows.
  const int64_t split_rows =
      std::min(sizes_.rows_max, RowsOfLaunch({.dtype = Dtype::kF16})) + kSpareRows;
  const int64_t split_bytes = kernels::SplitPitch(sizes_.hidden_size) * 2;
  LOGPROBD_ASSIGN_OR_RETURN(hidden_, AllocateDevice(rows * sizes_.hidden_size * 2, "hidden rows"));
  LOGPROBD_ASSIGN_OR_RETURN(
      source_, AllocateDevice(sizes_.rows_max * sizes_.hidden_size * 4, "hidden rows"));
  LOGPROBD_ASSIGN_OR_RETURN(
      splits_, AllocateDevice(split_rows * kernels::kHiddenSplitsMax * split_bytes, "bf16 splits"));
  LOGPROBD_ASSIGN_OR_RETURN(weights_, AllocateDevice(sizes_.num_heads * weight_bytes(), "weights"));
  LOGPROBD_ASSIGN_OR_RETURN(arena_, AllocateDevice(plan_.arena_bytes, "partials"));
  LOGPROBD_ASSIGN_OR_RETURN(lists_, AllocateDevice(sizes_.rows_max * kListMax * 4 * 4, "lists"));
  LOGPROBD_ASSIGN_OR_RETURN(floats_, AllocateDevice(kFloatArrays * rows * 4, "scores"));
  LOGPROBD_ASSIGN_OR_RETURN(
      normalizers_, AllocateDevice(rows * int64_t{sizeof(kernels::RowNormalizer)}, "scores"));
  LOGPROBD_ASSIGN_OR_RETURN(max_keys_, AllocateDevice(rows * 8, "scores"));
  LOGPROBD_ASSIGN_OR_RETURN(ranks_, AllocateDevice(rows * 8, "scores"));
  LOGPROBD_ASSIGN_OR_RETURN(targets_, AllocateDevice(rows * 4, "targets"));
  LOGPROBD_ASSIGN_OR_RETURN(nonfinite_, AllocateDevice(rows, "scores"));
  return absl::OkStatus();
}

absl::Status FusedFixture::Fill() {
  const double weight_stddev =
      sizes_.logit_stddev / std::sqrt(static_cast<double>(sizes_.hidden_size));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      FillNormal(hidden_.get(), AllRows() * sizes_.hidden_size, {.seed = 3 * sizes_.seed}));
  LOGPROBD_RETURN_IF_CUDA_ERROR(FillNormal(source_.get(), sizes_.rows_max * sizes_.hidden_size,
                                           {.dtype = Dtype::kF32, .seed = 3 * sizes_.seed + 1}));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      FillNormal(weights_.get(), sizes_.num_heads * weight_bytes() / 2,
                 {.mean = static_cast<float>(sizes_.weight_mean * weight_stddev),
                  .stddev = static_cast<float>(weight_stddev),
                  .seed = 3 * sizes_.seed + 2}));
  const std::vector<float> scales(static_cast<size_t>(AllRows()), kernels::Log2Scale(1.0F));
  const double correction = kernels::TruncationCorrection(sizes_.hidden_size);
  const std::vector<float> corrected(scales.size(), kernels::Log2Scale(1.0F, correction));
  std::vector<int32_t> ids(scales.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(static_cast<int64_t>(i) * 7'919 % sizes_.vocab_size);
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(Floats(kLog2Scale), scales.data(), scales.size() * 4, cudaMemcpyHostToDevice));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy(Floats(kCorrectedScale), corrected.data(),
                                           corrected.size() * 4, cudaMemcpyHostToDevice));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(targets(), ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
  std::vector<int32_t> pairs(static_cast<size_t>(sizes_.rows_max * kListMax) * 2);
  for (int64_t i = 0; i < sizes_.rows_max * kListMax; ++i) {
    pairs[static_cast<size_t>(i)] = static_cast<int32_t>(i / kListMax);
    pairs[static_cast<size_t>(i + sizes_.rows_max * kListMax)] =
        static_cast<int32_t>(i * 104'729 % sizes_.vocab_size);
  }
  const size_t pairs_bytes = pairs.size() * sizeof(int32_t);
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(lists_.get() + pairs_bytes, pairs.data(), pairs_bytes, cudaMemcpyHostToDevice));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  return absl::OkStatus();
}

int64_t FusedFixture::RowsOfLaunch(const Ask& ask) const {
  return plan_.FusedRows(ask.dtype, ask.entropy_temperature ? 2 : 1, ask.top_k);
}

std::byte* FusedFixture::Rows(Dtype dtype) const {
  return dtype == Dtype::kBf16 ? hidden_.get() : source_.get();
}

const std::byte* FusedFixture::NextWeight() {
  turn_ = (turn_ + 1) % sizes_.num_heads;
  return weights_.get() + turn_ * weight_bytes();
}

absl::Status FusedFixture::Score(int64_t num_rows, const Ask& ask, cudaStream_t stream) {
  const std::byte* const weight = NextWeight();
  const int64_t block_rows = EvenBlockRows(num_rows, RowsOfLaunch(ask));
  for (int64_t row = 0; row < num_rows; row += block_rows) {
    LOGPROBD_RETURN_IF_ERROR(
        ScoreBlock(row, std::min(block_rows, num_rows - row), ask, weight, stream));
  }
  return absl::OkStatus();
}

absl::StatusOr<FusedFixture::PreparedRows> FusedFixture::PrepareRows(int64_t row, int64_t num_rows,
                                                                     const Ask& ask,
                                                                     cudaStream_t stream) {
  const std::byte* const rows =
      Rows(ask.dtype) + row * sizes_.hidden_size * kernels::DtypeBytes(ask.dtype);
  if (ask.dtype == Dtype::kBf16) {
    return PreparedRows{.data = rows, .stride = sizes_.hidden_size, .num_splits = 1};
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchBf16Split({.dtype = ask.dtype,
                                                          .in = rows,
                                                          .in_stride = sizes_.hidden_size,
                                                          .num_rows = num_rows,
                                                          .hidden_size = sizes_.hidden_size,
                                                          .num_splits = ask.num_splits,
                                                          .out = splits_.get()},
                                                         stream));
  return PreparedRows{.data = splits_.get(),
                      .stride = ask.num_splits * kernels::SplitPitch(sizes_.hidden_size),
                      .num_splits = ask.num_splits};
}

absl::Status FusedFixture::ScoreBlock(int64_t row, int64_t num_rows, const Ask& ask,
                                      const std::byte* weight, cudaStream_t stream) {
  LOGPROBD_ASSIGN_OR_RETURN(const PreparedRows rows, PrepareRows(row, num_rows, ask, stream));
  const int64_t num_tiles = kernels::NumTiles(sizes_.vocab_size);
  auto* const sums = reinterpret_cast<kernels::TileSums*>(
      arena_.get() + WorkspacePlan::TopKKeyBytes(num_rows, ask.top_k));
  auto* const max_keys = reinterpret_cast<uint64_t*>(max_keys_.get()) + row;
  kernels::FusedPartialsParams params;
  params.num_rows = num_rows;
  params.readable_rows = num_rows + kSpareRows;
  params.hidden_size = sizes_.hidden_size;
  params.num_splits = rows.num_splits;
  params.hidden = rows.data;
  params.hidden_stride = rows.stride;
  params.weight = weight;
  params.weight_stride = sizes_.hidden_size;
  params.vocab_size = sizes_.vocab_size;
  params.tile_end = num_tiles;
  params.log2_scales = Floats(ask.corrected ? kCorrectedScale : kLog2Scale) + row;
  params.targets = targets() + row;
  params.layout = kernels::PartialLayoutOf(num_rows, num_tiles);
  params.sums = sums;
  params.wants_sum_squares = ask.sum_p_squared;
  params.target_logits = Floats(kTargetLogit) + row;
  if (ask.entropy_temperature) {
    params.entropy_log2_scales = params.log2_scales;
    params.entropy_sums = sums + num_rows * num_tiles;
  }
  if (ask.top_k > 0) {
    params.tile_max =
        reinterpret_cast<float*>(sums + (ask.entropy_temperature ? 2 : 1) * num_rows * num_tiles);
  }
  kernels::RowScoresParams scores;
  scores.num_rows = num_rows;
  scores.num_tiles = num_tiles;
  scores.vocab_size = sizes_.vocab_size;
  scores.layout = params.layout;
  scores.sums = params.sums;
  scores.entropy_sums = params.entropy_sums;
  scores.log2_scales = params.log2_scales;
  scores.target_logits = params.target_logits;
  scores.normalizers = reinterpret_cast<kernels::RowNormalizer*>(normalizers_.get()) + row;
  scores.nonfinite = reinterpret_cast<uint8_t*>(nonfinite_.get()) + row;
  scores.logprob = Floats(kLogprob) + row;
  scores.entropy = Floats(kEntropy) + row;
  if (ask.sum_p_squared) scores.sum_p_squared = Floats(kSumPSquared) + row;
  if (ask.argmax) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(max_keys, 0, static_cast<size_t>(num_rows) * 8, stream));
    params.max_keys = max_keys;
    scores.max_keys = max_keys;
    scores.argmax_logprob = Floats(kArgmaxLogprob) + row;
  }
  if (ask.target_rank) {
    auto* const counts = reinterpret_cast<int32_t*>(ranks_.get()) + row;
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(counts, 0, static_cast<size_t>(num_rows) * 4, stream));
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchListedLogits({.partials = params,
                                                               .ids = params.targets,
                                                               .count = num_rows,
                                                               .logits = params.target_logits},
                                                              stream));
    params.rank_counts = counts;
    scores.rank_counts = counts;
    scores.target_rank = counts + AllRows();
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(ask.choice.has_value()
                                    ? kernels::LaunchFusedPartialsAs(params, *ask.choice, stream)
                                    : kernels::LaunchFusedPartials(params, stream));
  if (!ask.combine) return absl::OkStatus();
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchRowScores(scores, stream));
  return ScoreLists(row, params, ask, stream);
}

absl::Status FusedFixture::ScoreLists(int64_t row, const kernels::FusedPartialsParams& params,
                                      const Ask& ask, cudaStream_t stream) {
  const int64_t array = sizes_.rows_max * kListMax;
  const auto* const normalizers =
      reinterpret_cast<const kernels::RowNormalizer*>(normalizers_.get()) + row;
  auto* const ids = reinterpret_cast<int32_t*>(lists_.get()) + row * kListMax;
  auto* const logprobs = reinterpret_cast<float*>(ids + array);
  if (ask.top_k > 0) {
    auto* const scratch = reinterpret_cast<std::byte*>(params.sums);
    auto* const keys = reinterpret_cast<uint64_t*>(arena_.get());
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchFusedTopK({.partials = params,
                                  .top_k = ask.top_k,
                                  .keys = keys,
                                  .workspace = scratch,
                                  .workspace_bytes = arena_.get() + plan_.arena_bytes - scratch},
                                 stream));
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchTopKScores({.num_rows = params.num_rows,
                                                             .top_k = ask.top_k,
                                                             .keys = keys,
                                                             .normalizers = normalizers,
                                                             .log2_scales = params.log2_scales,
                                                             .ids = ids,
                                                             .logprobs = logprobs},
                                                            stream));
  }
  if (ask.candidates) {
    const int32_t* const candidate_rows = ids + 2 * array;
    const auto row_begin = static_cast<int32_t>(row);
    const int64_t count = params.num_rows * kListMax;
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchListedLogits({.partials = params,
                                                               .rows = candidate_rows,
                                                               .ids = candidate_rows + array,
                                                               .row_begin = row_begin,
                                                               .count = count,
                                                               .logits = logprobs},
                                                              stream));
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchCandidateScores(
        {.rows = candidate_rows,
         .row_begin = row_begin,
         .row_end = row_begin + static_cast<int32_t>(params.num_rows),
         .count = count,
         .normalizers = normalizers,
         .log2_scales = params.log2_scales,
         .scores = logprobs},
        stream));
  }
  return absl::OkStatus();
}

}  // namespace logprobd::testing
