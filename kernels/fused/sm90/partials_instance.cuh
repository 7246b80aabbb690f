#pragma once

// Definition of LaunchWgmmaPartialsInstance. The generated sources (instance.cu.in) instantiate it
// for a block tile and a dtype, with or without a logit transform, and with or without cached
// exponentials.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused/choice.h"
#include "kernels/fused/head_epilogue.cuh"
#include "kernels/fused/sm90/head_kernel.cuh"
#include "kernels/fused/sm90/swapped_epilogue.cuh"
#include "kernels/fused/sm90/tile_epilogue.cuh"
#include "kernels/fused/sm90/wgmma_launch.h"

namespace logprobd::kernels::internal {

template <FusedTile kTile, Dtype kDtype, bool kTransforms, bool kCachesExponentials>
cudaError_t LaunchWgmmaPartialsInstance(const FusedPartialsParams& params,
                                        const FusedChoice& choice, cudaStream_t stream) {
  const HeadEpilogueParams epilogue = HeadEpilogueParamsOf(params);
  if constexpr (IsSwapped(kTile)) {
    constexpr auto kRows = static_cast<int>(TileRows(kTile));
    return LaunchHeadKernel<kTile, kDtype,
                            SwappedEpilogue<kTransforms, kCachesExponentials, kRows>>(
        params, choice, epilogue, stream);
  } else {
    return LaunchHeadKernel<kTile, kDtype,
                            TileEpilogue<HeadEpilogue<kTransforms, kCachesExponentials>>>(
        params, choice, epilogue, stream);
  }
}

}  // namespace logprobd::kernels::internal
