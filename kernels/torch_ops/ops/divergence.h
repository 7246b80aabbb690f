#pragma once

// The passes of linear_divergence. No [rows, vocabulary] tensor of either model's logits exists:
// the logits of as many rows as fit a number of bytes exist at a time.

#include "kernels/torch_ops/types/divergence.h"

namespace logprobd::torch_ops {

/// Computes the divergence of every row and the student's entropy. Throws c10::ValueError, which
/// names the argument, if one is invalid. Waits for the device once if there is a mask, unless a
/// CUDA graph is being captured: then all rows are computed. Thread-safe.
DivergenceOutputs ForwardDivergence(const DivergenceInputs& inputs,
                                    const DivergenceOptions& options);

/// Computes the gradients with respect to student_hidden, student_weight and student_bias. Rows
/// without an upstream gradient are not computed.
InputGradients BackwardDivergence(const DivergenceUpstream& upstream,
                                  const DivergenceInputs& inputs, const DivergenceOptions& options,
                                  GradientNeeds needs);

/// Computes a loss and its gradients in one pass: each block of rows is multiplied as soon as its
/// gradients exist. `row_weights` [...] are the weights of rows (absent: 1); the loss is divided by
/// the number of rows that are not masked if `is_mean`. A row with the weight 0 is not part of the
/// loss, even if its divergence is NaN.
DivergenceLoss ForwardDivergenceLoss(const DivergenceInputs& inputs,
                                     const DivergenceOptions& options,
                                     const MaybeTensor& row_weights, bool is_mean,
                                     GradientNeeds needs);

}  // namespace logprobd::torch_ops
