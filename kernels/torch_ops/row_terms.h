#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/torch_ops/backward_rows.h"
#include "kernels/torch_ops/linear_logprob.h"

namespace logprobd::torch_ops {

/// Rows as they weigh the terms of
///   dx_j = p_j (free - d_entropy (ln p_j + entropy)) + target [j = t] + mean w_j
/// with p the softmax, t the target and w the weights of the mean logit; [n, 1] each in the wide
/// type.
struct RowTerms {
  at::Tensor free;       ///< d_lse - d_logprob
  at::Tensor d_entropy;  ///< Undefined: 0, as the next two.
  at::Tensor target;     ///< d_logprob
  at::Tensor mean;       ///< d_mean_logit
  at::Tensor entropy;    ///< Undefined where d_entropy is.
  at::Tensor level;      ///< A logit near the largest ones: lse * temperature, rounded.
  at::Tensor rest;       ///< level / temperature - lse
  at::Tensor scale;      ///< 1 / temperature
};

RowTerms TermsOf(const BackwardRows& all, const LinearLogprobInputs& inputs,
                 const LinearLogprobOptions& options);

}  // namespace logprobd::torch_ops
