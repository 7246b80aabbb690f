#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/dtype.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/params.h"
#include "kernels/fused/tile_logits.h"

// What the entries in kernels/fused call to run the kernels of this folder, and the declarations of
// their instances. Parameters must have been checked.
namespace logprobd::kernels::internal {

/// Returns true if this build contains the kernels for Hopper. Without them their launches return
/// cudaErrorNotSupported.
bool HasWgmmaKernels();

/// Launches the instance of the Hopper kernel for `choice` and `params`, which must have been
/// checked. Returns cudaErrorInvalidValue if there is no such instance.
[[nodiscard]] cudaError_t LaunchWgmmaPartials(const FusedPartialsParams& params,
                                              const FusedChoice& choice, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchWgmmaGradient(const FusedGradientParams& params,
                                              const FusedChoice& choice, cudaStream_t stream);

/// Enqueues, on a Hopper GPU, the search of listed (row, tile) pairs for logits that can be among
/// the row's top_k largest. The logits are bit-identical to those of the fused kernel. Returns
/// cudaErrorNotSupported in a build without CUTLASS.
[[nodiscard]] cudaError_t LaunchWgmmaTileLogits(const TileLogitsParams& params,
                                                cudaStream_t stream);

/// Launches one instance of the kernel that computes partials. CMakeLists.txt lists the instances;
/// each has its own generated source file, which takes half a minute to compile. `params` must have
/// been checked; they may have a transform or a bias only if kTransforms is true, and exponentials
/// only if kCachesExponentials is true.
template <FusedTile kTile, Dtype kDtype, bool kTransforms, bool kCachesExponentials>
cudaError_t LaunchWgmmaPartialsInstance(const FusedPartialsParams& params,
                                        const FusedChoice& choice, cudaStream_t stream);

/// Launches one instance of the kernel that computes gradients. See LaunchWgmmaPartialsInstance.
/// `params` must have been checked; they may have a transform, a bias or mean_logit_weights only if
/// kTransforms is true.
template <FusedTile kTile, Dtype kDtype, bool kTransforms>
cudaError_t LaunchWgmmaGradientInstance(const FusedGradientParams& params,
                                        const FusedChoice& choice, cudaStream_t stream);

}  // namespace logprobd::kernels::internal
