#pragma once

// Definition of LaunchGradientInstance. The generated sources (instance.cu.in) instantiate it for a
// block tile and a dtype, with or without a logit transform.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused_sm90/fused_launch.h"
#include "kernels/fused_sm90/gradient_epilogue.cuh"
#include "kernels/fused_sm90/head_kernel.cuh"
#include "kernels/fused_sm90/swapped_gradient_epilogue.cuh"

namespace logprobd::kernels::internal {

template <FusedTile kTile, Dtype kDtype, bool kTransforms>
cudaError_t LaunchGradientInstance(const FusedGradientParams& params, const FusedChoice& choice,
                                   cudaStream_t stream) {
  using Element = cute::conditional_t<kDtype == Dtype::kBf16, __nv_bfloat16, __half>;
  const FusedPartialsParams& head = params.head;
  const int64_t first_column = head.tile_begin * kTileColumns;
  const auto from_first_column = [&](const float* columns) {
    return columns == nullptr ? nullptr : columns + first_column;
  };
  const GradientEpilogueParams<Element> epilogue = {
      static_cast<int32_t>(head.num_rows),
      static_cast<int32_t>(head.vocab_size - first_column),
      static_cast<int32_t>(head.tile_end - head.tile_begin),
      static_cast<int32_t>(first_column),
      head.transform,
      from_first_column(head.bias),
      from_first_column(params.mean_logit_weights),
      params.rows,
      static_cast<Element*>(params.gradients),
      params.gradient_stride};
  if constexpr (IsSwapped(kTile)) {
    constexpr auto kRows = static_cast<int>(TileRows(kTile));
    return LaunchHeadKernel<kTile, kDtype, SwappedGradientEpilogue<Element, kTransforms, kRows>>(
        head, choice, epilogue, stream);
  } else {
    return LaunchHeadKernel<kTile, kDtype, GradientEpilogue<Element, kTransforms>>(
        head, choice, epilogue, stream);
  }
}

}  // namespace logprobd::kernels::internal
