#include "kernels/fused_sm90/fused_instance.cuh"

namespace logprobd::kernels::internal {

template cudaError_t LaunchFusedInstance<FusedTile::k128PingPong, Dtype::kBf16, true, true>(
    const FusedPartialsParams&, const FusedChoice&, cudaStream_t);

}  // namespace logprobd::kernels::internal
