// The launches of the kernels for Hopper in a build without CUTLASS: each returns
// cudaErrorNotSupported.

#include "kernels/fused/choice.h"
#include "kernels/fused/sm90/wgmma_launch.h"
#include "kernels/fused/tile_logits.h"

namespace logprobd::kernels::internal {

bool HasWgmmaKernels() { return false; }

cudaError_t LaunchWgmmaPartials(const FusedPartialsParams& /*params*/,
                                const FusedChoice& /*choice*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchWgmmaGradient(const FusedGradientParams& /*params*/,
                                const FusedChoice& /*choice*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchWgmmaTileLogits(const TileLogitsParams& /*params*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

}  // namespace logprobd::kernels::internal
