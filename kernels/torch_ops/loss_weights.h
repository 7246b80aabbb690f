#pragma once

#include <array>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rows.h"

namespace logprobd::torch_ops {

/// What the rows' scores count in a loss.
struct LossWeights {
  UpstreamGradients rows;  ///< Each like target; absent: 1 for every row.
  /// By which they are multiplied: of logprob, entropy, lse and mean logit. 0: that score has no
  /// part.
  std::array<double, 4> factors = {};
  bool is_mean = false;  ///< Divided by the number of rows that are not ignored, at least 1.
};

/// Throws c10::ValueError, naming the argument, where weights do not fit; for symbolic sizes too.
void CheckWeights(const LossWeights& weights, const LinearLogprobInputs& inputs);

/// What decides which rows have a weight: the tensors of scores that have a part, and nothing where
/// some score weighs every row.
UpstreamGradients DecidingWeights(const LossWeights& weights);

/// Whether any of them is given.
bool HasAny(const UpstreamGradients& gradients);

/// Of `rows`, [n] each, as a backward takes them; 0 where a row is ignored and yet among them (in
/// graphs).
UpstreamGradients WeightsOfRows(const LossWeights& weights, const Rows& rows,
                                const LinearLogprobInputs& inputs,
                                const LinearLogprobOptions& options);

}  // namespace logprobd::torch_ops
