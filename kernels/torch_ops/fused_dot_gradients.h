#pragma once

#include <memory>

#include "kernels/torch_ops/dot_gradients.h"

namespace logprobd::torch_ops {

/// Whether the rows that are differentiated are taken from a search that has not ended, as
/// AreScoredWhileSearched (fused_forward.h) says of scores.
bool AreDifferentiatedWhileSearched(const UpstreamGradients& upstream,
                                    const LinearLogprobInputs& inputs,
                                    const LinearLogprobOptions& options, const Shard& shard);

/// By the fused kernels, in 16 bits; null where they do not take the inputs.
std::unique_ptr<DotGradients> MakeFusedDotGradients(const DotGradientsArguments& arguments);

}  // namespace logprobd::torch_ops
