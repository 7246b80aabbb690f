#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/dtype.h"
#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_gradient.h"

namespace logprobd::kernels::internal {

/// One instance of the kernel; each is defined in a gradient_*.cu of its own. `params` have been
/// checked, and have a transform or column weights only if kTransforms.
template <FusedTile kTile, Dtype kDtype, bool kTransforms>
cudaError_t LaunchGradientInstance(const FusedGradientParams& params, const FusedChoice& choice,
                                   cudaStream_t stream);

}  // namespace logprobd::kernels::internal
