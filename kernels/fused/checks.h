#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/tile.h"
#include "kernels/fused/params.h"

// The questions that the launches of all fused kernels ask about their parameters.
namespace logprobd::kernels::internal {

/// Returns true when `params` have at least one row, and rows, weight and vocabulary are within the
/// bounds that params.h states. Callers must check outputs and scales themselves.
inline bool HasValidOperands(const FusedPartialsParams& params) {
  constexpr int64_t kRowsMax = 1 << 24;
  constexpr int64_t kVocabMax = 1 << 20;
  constexpr int64_t kDepthMax = 1 << 24;
  constexpr int64_t kAlignmentElements = 8;
  const auto is_aligned = [](const void* pointer, int64_t stride) {
    return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % 16 == 0 &&
           stride % kAlignmentElements == 0;
  };
  if (params.num_splits < 1 || params.num_splits > kHiddenSplitsMax || params.hidden_size < 1) {
    return false;
  }
  const int64_t row_elements = params.num_splits == 1
                                   ? params.hidden_size
                                   : params.num_splits * SplitPitch(params.hidden_size);
  return params.dtype != Dtype::kF32 && params.num_rows >= 1 && params.num_rows <= kRowsMax &&
         row_elements <= kDepthMax && is_aligned(params.hidden, params.hidden_stride) &&
         params.hidden_stride >= row_elements && is_aligned(params.weight, params.weight_stride) &&
         params.weight_stride >= params.hidden_size && params.vocab_size >= 1 &&
         params.vocab_size <= kVocabMax && params.tile_begin >= 0 &&
         params.tile_begin < params.tile_end && params.tile_end <= NumTiles(params.vocab_size);
}

/// Returns true if logits differ from dot products, so that an instance with a transform is needed.
inline bool HasTransform(const FusedPartialsParams& params) {
  return params.bias != nullptr || !params.transform.IsIdentity();
}
inline bool HasTransform(const FusedGradientParams& params) {
  return HasTransform(params.head) || params.mean_logit_weights != nullptr;
}

}  // namespace logprobd::kernels::internal
