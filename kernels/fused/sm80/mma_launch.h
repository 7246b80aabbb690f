#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/dtype.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/params.h"
#include "kernels/fused/tile_logits.h"

// This file contains what the entries in kernels/fused call to run the kernels of this folder,
// and the declarations of their instances. Parameters must have been checked.
namespace logprobd::kernels::internal {

/// Enqueues the partials of LaunchFusedPartials in block tiles of kMma64 or kMma128. Cached
/// exponentials require kMma128. Returns cudaErrorInvalidValue for another tile.
[[nodiscard]] cudaError_t LaunchMmaPartials(const FusedPartialsParams& params, FusedTile tile,
                                            cudaStream_t stream);

/// Enqueues the gradients of LaunchFusedGradient in block tiles of kMma128. Returns
/// cudaErrorInvalidValue for another tile.
[[nodiscard]] cudaError_t LaunchMmaGradient(const FusedGradientParams& params, FusedTile tile,
                                            cudaStream_t stream);

/// Enqueues the logits of listed (row, tile) pairs (LaunchWgmmaTileLogits), with the bits that they
/// have in LaunchMmaPartials.
[[nodiscard]] cudaError_t LaunchMmaTileLogits(const TileLogitsParams& params, cudaStream_t stream);

/// Launches one instance of the kernel that computes partials. CMakeLists.txt lists the instances;
/// each has its own generated source file.
template <FusedTile kTile, Dtype kDtype, bool kTransforms, bool kCachesExponentials>
cudaError_t LaunchMmaPartialsInstance(const FusedPartialsParams& params, cudaStream_t stream);

/// Launches one instance of the kernel that computes gradients.
template <FusedTile kTile, Dtype kDtype, bool kTransforms>
cudaError_t LaunchMmaGradientInstance(const FusedGradientParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels::internal
