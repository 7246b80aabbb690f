#include "kernels/fused_sm90/gradient_instance.cuh"

namespace logprobd::kernels::internal {

template cudaError_t LaunchGradientInstance<FusedTile::k128PingPong, Dtype::kBf16, true>(
    const FusedGradientParams&, const FusedChoice&, cudaStream_t);

}  // namespace logprobd::kernels::internal
