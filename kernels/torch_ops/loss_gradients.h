#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/loss_weights.h"

namespace logprobd::torch_ops {

/// One loss of all rows, and its gradients with respect to the inputs.
struct LinearLogprobLoss {
  at::Tensor loss;              ///< [], fp32 (fp64 where hidden or weight are).
  LinearLogprobOutputs scores;  ///< As Forward's, without lse_rest and cache.
  InputGradients gradients;     ///< As Backward's.
};

/// The loss: the sum over rows of the scores, each times its weight, and the gradients formed on
/// the way. Rows whose weights are all zero are scored but get no gradient, and a score with a
/// weight of zero has no part, though it be NaN.
///
/// Logits are kept as options.keep_logits says, for as many rows at a time as fit `cache_bytes`, at
/// least one. The weight's gradient of rows that all fit is written once, in its dtype; else it is
/// added up in the wide type.
///
/// Ranks and errors as in Forward. Thread-safe.
LinearLogprobLoss ForwardWithGradients(const LossWeights& weights,
                                       const LinearLogprobInputs& inputs,
                                       const LinearLogprobOptions& options, GradientNeeds needs,
                                       int64_t cache_bytes);

/// Multiplies a gradient by `factor`, of one element, in place. Its memory is left alone where the
/// factor is 1 and can be looked at without waiting.
void ScaleGradient(at::Tensor& gradient, const at::Tensor& factor);

}  // namespace logprobd::torch_ops
