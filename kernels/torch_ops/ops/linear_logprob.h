#pragma once

#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

/// Scores every row. Logits exist for one block of rows and columns at a time unless
/// options.memory requests a cache.
///
/// The ranks of a group must call it together, with the same targets; if one rank fails, all throw.
/// A CUDA graph can capture a call with a group of several ranks after the same call outside of it
/// (RankGroup::StartExchange); the ranks do not compare their arguments then.
/// Throws c10::ValueError for invalid arguments and c10::IndexError for an out-of-vocabulary
/// target. Thread-safe. `weight_grad` is only checked: it is that of the backward pass.
LinearLogprobOutputs Forward(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                             const MaybeTensor& weight_grad);

/// Computes the gradients of the inputs, one block of columns at a time, from cached or recomputed
/// logits. With a cache in the wide dtype, the results are bit-identical to those from recomputed
/// logits. If `weight_grad`, fp32 [V, H], is given, the weight's gradient is added to it and not
/// returned. The rules of Forward for ranks, errors and threads apply, except that on a GPU ranks
/// may learn only in their next call that another one failed (RankGroup::ShareError).
InputGradients Backward(const MaybeTensor& weight_grad, const UpstreamGradients& upstream,
                        const SavedOutputs& saved, const LinearLogprobInputs& inputs,
                        const LinearLogprobOptions& options, GradientNeeds needs);

}  // namespace logprobd::torch_ops
