#pragma once

#include <cstdint>

#include "kernels/torch_ops/types/loss.h"

namespace logprobd::torch_ops {

/// Computes the loss, which is the sum over rows of each score times its coefficient, and its
/// gradients in the same pass. A row whose coefficients are all zero is scored but has no gradient;
/// a score with the coefficient 0 is ignored, even if it is NaN.
///
/// Logits are cached in the form of options.memory.keep_logits, for as many rows at a time as fit
/// `cache_bytes`, but for at least one row. When all rows fit, the weight's gradient is written
/// once in its dtype; otherwise it is summed in the wide dtype. The rules of Backward for ranks,
/// errors and threads apply.
LinearLogprobLoss ForwardWithGradients(const LinearLogprobInputs& inputs,
                                       const LinearLogprobOptions& options,
                                       const LossCoefficients& coefficients, GradientNeeds needs,
                                       int64_t cache_bytes);

/// Multiplies `gradient` in place by `factor`, which has one element. If the factor is 1, memory is
/// not touched, unless the host would have to wait for a device to read the factor.
void ScaleGradient(at::Tensor& gradient, const at::Tensor& factor);

}  // namespace logprobd::torch_ops
