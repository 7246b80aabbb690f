#pragma once

#include <ATen/core/Tensor.h>

namespace logprobd::torch_ops {

/// Whether two factors are multiplied without being widened: on a GPU, in one 16-bit dtype.
bool IsMultipliedAsIs(const at::Tensor& a, const at::Tensor& b);

/// The product a * b, [n, k] and [k, m], with sums and results in `wide`; nothing is rounded
/// before.
at::Tensor WideProduct(const at::Tensor& a, const at::Tensor& b, at::ScalarType wide);

/// What becomes of what is in the place of a product.
enum class Into { kAddTo, kReplace };

/// Adds a * b, summed in `wide`, to `place` [n, m], or replaces it, rounded once to its dtype.
/// Without a product beside it where factors are multiplied as they are.
void MultiplyInto(const at::Tensor& place, Into into, const at::Tensor& a, const at::Tensor& b,
                  at::ScalarType wide);

}  // namespace logprobd::torch_ops
