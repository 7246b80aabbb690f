#pragma once

// Definitions of the launches of instances. The generated sources (instance.cu.in) instantiate one
// of them for a block tile and a dtype, with or without a logit transform, and with or without
// cached exponentials.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "kernels/fused/choice.h"
#include "kernels/fused/gradient_epilogue.cuh"
#include "kernels/fused/head_epilogue.cuh"
#include "kernels/fused/sm80/mma_kernel.cuh"
#include "kernels/fused/sm80/mma_launch.h"

namespace logprobd::kernels::internal {

template <FusedTile kTile, Dtype kDtype, bool kTransforms, bool kCachesExponentials>
cudaError_t LaunchMmaPartialsInstance(const FusedPartialsParams& params, cudaStream_t stream) {
  return LaunchMmaKernel<TileRows(kTile), kDtype, HeadEpilogue<kTransforms, kCachesExponentials>>(
      params, HeadEpilogueParamsOf(params), stream);
}

template <FusedTile kTile, Dtype kDtype, bool kTransforms>
cudaError_t LaunchMmaGradientInstance(const FusedGradientParams& params, cudaStream_t stream) {
  using Element = std::conditional_t<kDtype == Dtype::kBf16, __nv_bfloat16, __half>;
  return LaunchMmaKernel<TileRows(kTile), kDtype, GradientEpilogue<Element, kTransforms>>(
      params.head, GradientEpilogueParamsOf<Element>(params), stream);
}

}  // namespace logprobd::kernels::internal
