#include "tests/bench/fused_scene.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/chunked/chunk_plan.h"
#include "kernels/combine/row_scores.h"
#include "kernels/common/terms.h"
#include "kernels/common/tile.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "server/base/errors.h"
#include "server/engine/cuda_status.h"
#include "tests/bench/random_fill.h"

namespace logprobd::testing {
namespace {

using kernels::kTileColumns;

constexpr int64_t kArenaBytes = int64_t{64} << 20;
constexpr double kLogitStddev = 3;
/// Rows beyond the last, so that every block tile is whole.
constexpr int64_t kSpareRows = 256;

}  // namespace

absl::StatusOr<std::unique_ptr<FusedScene>> FusedScene::Create(const Sizes& sizes) {
  std::unique_ptr<FusedScene> scene(new FusedScene(sizes));
  LOGPROBD_RETURN_IF_ERROR(scene->Allocate());
  return scene;
}

int64_t FusedScene::weight_bytes() const {
  return kernels::NumTiles(sizes_.vocab_size) * kTileColumns * sizes_.hidden_size * 2;
}

absl::Status FusedScene::Allocate() {
  const int64_t rows = sizes_.rows_max + kSpareRows;
  const int64_t hidden_elements = rows * 2 * kernels::TermPitch(sizes_.hidden_size);
  LOGPROBD_ASSIGN_OR_RETURN(hidden_, AllocateDevice(hidden_elements * 2, "hidden rows"));
  LOGPROBD_ASSIGN_OR_RETURN(weights_, AllocateDevice(sizes_.num_heads * weight_bytes(), "weights"));
  LOGPROBD_ASSIGN_OR_RETURN(arena_, AllocateDevice(kArenaBytes, "partials"));
  LOGPROBD_ASSIGN_OR_RETURN(floats_, AllocateDevice(rows * 4 * 6, "scores"));
  LOGPROBD_ASSIGN_OR_RETURN(
      normalizers_, AllocateDevice(rows * int64_t{sizeof(kernels::RowNormalizer)}, "scores"));
  LOGPROBD_ASSIGN_OR_RETURN(max_keys_, AllocateDevice(rows * 8, "scores"));
  LOGPROBD_ASSIGN_OR_RETURN(targets_, AllocateDevice(rows * 4, "targets"));
  LOGPROBD_ASSIGN_OR_RETURN(nonfinite_, AllocateDevice(rows, "scores"));
  LOGPROBD_RETURN_IF_CUDA_ERROR(FillNormal(hidden_.get(), hidden_elements, 1.0F, 1));
  LOGPROBD_RETURN_IF_CUDA_ERROR(FillNormal(
      weights_.get(), sizes_.num_heads * weight_bytes() / 2,
      static_cast<float>(kLogitStddev / std::sqrt(static_cast<double>(sizes_.hidden_size))), 2));
  const std::vector<float> scales(static_cast<size_t>(rows), kernels::Log2Scale(1.0F));
  std::vector<int32_t> targets(static_cast<size_t>(rows));
  for (size_t i = 0; i < targets.size(); ++i) {
    targets[i] = static_cast<int32_t>(static_cast<int64_t>(i) * 7'919 % sizes_.vocab_size);
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(floats_.get(), scales.data(), scales.size() * 4, cudaMemcpyHostToDevice));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(targets_.get(), targets.data(), targets.size() * 4, cudaMemcpyHostToDevice));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  return absl::OkStatus();
}

int64_t FusedScene::RowsOfLaunch(const Ask& ask) const {
  const kernels::ChunkPlan plan = kernels::PlanChunks(
      {.vocab_size = sizes_.vocab_size, .hidden_size = sizes_.hidden_size, .with_fused = true});
  return plan.FusedRows(ask.terms ? kernels::Dtype::kF32 : kernels::Dtype::kBf16,
                        ask.entropy_temperature ? 2 : 1);
}

const std::byte* FusedScene::NextWeight() {
  turn_ = (turn_ + 1) % sizes_.num_heads;
  return weights_.get() + turn_ * weight_bytes();
}

absl::Status FusedScene::Score(int64_t num_rows, const Ask& ask, cudaStream_t stream) {
  const std::byte* const weight = NextWeight();
  const int64_t block_rows = RowsOfLaunch(ask);
  for (int64_t row = 0; row < num_rows; row += block_rows) {
    LOGPROBD_RETURN_IF_ERROR(
        ScoreBlock(row, std::min(block_rows, num_rows - row), ask, weight, stream));
  }
  return absl::OkStatus();
}

absl::Status FusedScene::ScoreBlock(int64_t row, int64_t num_rows, const Ask& ask,
                                    const std::byte* weight, cudaStream_t stream) {
  const int64_t all_rows = sizes_.rows_max + kSpareRows;
  const int64_t num_tiles = kernels::NumTiles(sizes_.vocab_size);
  const int64_t hidden_stride = ask.terms
                                    ? kernels::kHiddenTerms * kernels::TermPitch(sizes_.hidden_size)
                                    : sizes_.hidden_size;
  auto* const floats = reinterpret_cast<float*>(floats_.get());
  auto* const sums = reinterpret_cast<kernels::TileSums*>(arena_.get());
  auto* const max_keys = reinterpret_cast<uint64_t*>(max_keys_.get()) + row;
  kernels::FusedPartialsParams params;
  params.num_rows = num_rows;
  params.readable_rows = all_rows - row;
  params.hidden_size = sizes_.hidden_size;
  params.num_terms = ask.terms ? kernels::kHiddenTerms : 1;
  params.hidden = hidden_.get() + row * hidden_stride * 2;
  params.hidden_stride = hidden_stride;
  params.weight = weight;
  params.weight_stride = sizes_.hidden_size;
  params.vocab_size = sizes_.vocab_size;
  params.tile_end = num_tiles;
  params.log2_scales = floats + row;
  params.targets = reinterpret_cast<const int32_t*>(targets_.get()) + row;
  params.layout = kernels::PartialLayoutOf(num_rows, num_tiles);
  params.sums = sums;
  params.wants_sum_squares = ask.sum_p_squared;
  params.target_logits = floats + all_rows + row;
  if (ask.entropy_temperature) {
    params.entropy_log2_scales = params.log2_scales;
    params.entropy_sums = sums + num_rows * num_tiles;
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
  scores.follows_partials = true;
  scores.normalizers = reinterpret_cast<kernels::RowNormalizer*>(normalizers_.get()) + row;
  scores.nonfinite = reinterpret_cast<uint8_t*>(nonfinite_.get()) + row;
  scores.logprob = floats + 2 * all_rows + row;
  scores.entropy = floats + 3 * all_rows + row;
  if (ask.sum_p_squared) scores.sum_p_squared = floats + 4 * all_rows + row;
  if (ask.argmax) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(max_keys, 0, static_cast<size_t>(num_rows) * 8, stream));
    params.max_keys = max_keys;
    scores.max_keys = max_keys;
    scores.argmax_logprob = floats + 5 * all_rows + row;
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchFusedPartials(params, stream));
  if (!ask.combine) return absl::OkStatus();
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchRowScores(scores, stream));
  return absl::OkStatus();
}

}  // namespace logprobd::testing
