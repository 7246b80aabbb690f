// The launches of the kernels for Hopper in a build without CUTLASS: each returns
// cudaErrorNotSupported.

#include "kernels/fused_sm90/fused_launch.h"
#include "kernels/fused_sm90/tile_logits.h"

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

cudaError_t LaunchTileLogits(const TileLogitsParams& /*params*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

}  // namespace logprobd::kernels::internal
