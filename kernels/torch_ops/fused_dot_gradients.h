#pragma once

#include <memory>

#include "kernels/torch_ops/dot_gradients.h"

namespace logprobd::torch_ops {

/// By the fused kernels, in 16 bits; null where they do not take the inputs.
std::unique_ptr<DotGradients> MakeFusedDotGradients(const DotGradientsArguments& arguments);

}  // namespace logprobd::torch_ops
