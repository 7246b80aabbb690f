#pragma once

// Computes matrix products and logits with tensor operations.

#include <ATen/core/Tensor.h>

#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {

inline constexpr double kLog2E = 1.44269504088896340736;

/// Returns the product of a [n, k] and b [k, m], with sums and result in `wide`. Factors are never
/// rounded.
at::Tensor WideProduct(const at::Tensor& a, const at::Tensor& b, at::ScalarType wide);

/// How a product is combined with the value already in its destination.
enum class Into { kAddTo, kReplace };

/// Combines a * b, summed in `wide`, with `destination` [n, m] and rounds once to the dtype of
/// `destination`. 16-bit factors need no additional memory for the product.
void MultiplyInto(const at::Tensor& destination, Into into, const at::Tensor& a,
                  const at::Tensor& b, at::ScalarType wide);

/// Returns the logits of some columns for `hidden` [n, H] before temperature, [n, columns] in
/// problem.wide.
at::Tensor BlockLogits(const at::Tensor& hidden, const Problem& problem, Columns columns);

/// Returns `factor` divided by each row's temperature, [n, 1] in `dtype`, rounded once (on a CPU as
/// kernels/cpu rounds it).
at::Tensor PerTemperature(double factor, const Rows& rows, const Problem& problem,
                          at::ScalarType dtype);

/// Returns the weights of the mean logit for some columns, in fp64.
at::Tensor MeanLogitWeights(const Problem& problem, Columns columns);

}  // namespace logprobd::torch_ops
