#include "kernels/fused_sm90/gradient_instance.cuh"

namespace logprobd::kernels::internal {

template cudaError_t LaunchGradientInstance<FusedTile::k64Pair, Dtype::kF16, false>(
    const FusedGradientParams&, const FusedChoice&, cudaStream_t);

}  // namespace logprobd::kernels::internal
