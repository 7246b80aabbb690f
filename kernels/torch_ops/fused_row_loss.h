#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/torch_ops/linear_logprob.h"

namespace logprobd::torch_ops {

/// The sum of `scores` times `weights`, [n] each, as an fp32 [], by one kernel; nothing where they
/// are not fp32 on a GPU.
std::optional<at::Tensor> RowLossOnGpu(const LinearLogprobOutputs& scores,
                                       const UpstreamGradients& weights);

}  // namespace logprobd::torch_ops
