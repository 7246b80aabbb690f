#pragma once

// Definition of LaunchWgmmaGradientInstance. The generated sources (instance.cu.in) instantiate it
// for a block tile and a dtype, with or without a logit transform.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "kernels/fused/choice.h"
#include "kernels/fused/gradient_epilogue.cuh"
#include "kernels/fused/sm90/head_kernel.cuh"
#include "kernels/fused/sm90/swapped_gradient_epilogue.cuh"
#include "kernels/fused/sm90/tile_epilogue.cuh"
#include "kernels/fused/sm90/wgmma_launch.h"

namespace logprobd::kernels::internal {

template <FusedTile kTile, Dtype kDtype, bool kTransforms>
cudaError_t LaunchWgmmaGradientInstance(const FusedGradientParams& params,
                                        const FusedChoice& choice, cudaStream_t stream) {
  using Element = std::conditional_t<kDtype == Dtype::kBf16, __nv_bfloat16, __half>;
  const auto epilogue = GradientEpilogueParamsOf<Element>(params);
  if constexpr (IsSwapped(kTile)) {
    constexpr auto kRows = static_cast<int>(TileRows(kTile));
    return LaunchHeadKernel<kTile, kDtype, SwappedGradientEpilogue<Element, kTransforms, kRows>>(
        params.head, choice, epilogue, stream);
  } else {
    return LaunchHeadKernel<kTile, kDtype, TileEpilogue<GradientEpilogue<Element, kTransforms>>>(
        params.head, choice, epilogue, stream);
  }
}

}  // namespace logprobd::kernels::internal
