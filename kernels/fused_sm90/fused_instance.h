#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/dtype.h"
#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_partials.h"

namespace logprobd::kernels::internal {

/// One instance of the kernel; each is defined in an instance_*.cu of its own, which takes half a
/// minute to compile. `params` have been checked, and have a transform only if kTransforms,
/// exponentials only if kCachesExponentials.
template <FusedTile kTile, Dtype kDtype, bool kTransforms, bool kCachesExponentials>
cudaError_t LaunchFusedInstance(const FusedPartialsParams& params, const FusedChoice& choice,
                                cudaStream_t stream);

}  // namespace logprobd::kernels::internal
