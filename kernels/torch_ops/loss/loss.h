#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <tuple>

#include "kernels/torch_ops/api/linear_logprob.h"

namespace logprobd::torch_ops {

/// Coefficients of the scores in a loss. The coefficient of a row's score is the product of a
/// tensor's element and a factor.
struct LossCoefficients {
  MaybeTensor logprob;     ///< Shaped like target; absent: 1 for every row.
  MaybeTensor entropy;     ///< Shaped like target; absent: 1 for every row.
  MaybeTensor lse;         ///< Shaped like target; absent: 1 for every row.
  MaybeTensor mean_logit;  ///< Shaped like target; absent: 1 for every row.
  /// Factors of logprob, entropy, lse and mean logit, in this order. 0: the score is not part of
  /// the loss.
  std::array<double, 4> factors = {};
  bool is_mean = false;  ///< True: the loss is divided by the number of valid rows, at least 1.

  static constexpr auto Fields() {
    using Coef = LossCoefficients;
    return std::tuple{
        Field{"logprob_coef", &Coef::logprob}, Field{"entropy_coef", &Coef::entropy},
        Field{"lse_coef", &Coef::lse},         Field{"mean_logit_coef", &Coef::mean_logit},
        Field{"factors", &Coef::factors},      Field{"is_mean", &Coef::is_mean}};
  }

  /// Returns the tensors in the order of the factors.
  UpstreamGradients tensors() const { return {logprob, entropy, lse, mean_logit}; }
};

/// One loss of all rows, and its gradients with respect to the inputs.
struct LinearLogprobLoss {
  at::Tensor loss;              ///< [], in the wide dtype.
  LinearLogprobOutputs scores;  ///< Result of Forward, without lse_rest and cache.
  InputGradients gradients;     ///< Result of Backward.
};

/// Throws a c10::ValueError that names the argument if coefficients do not match the inputs. Sizes
/// may be symbolic.
void CheckCoefficients(const LossCoefficients& coefficients, const LinearLogprobInputs& inputs);

/// Computes the loss, which is the sum over rows of each score times its coefficient, and its
/// gradients in the same pass. A row whose coefficients are all zero is scored but has no gradient;
/// a score with the coefficient 0 is ignored, even if it is NaN.
///
/// Logits are cached in the form of options.keep_logits, for as many rows at a time as fit
/// `cache_bytes`, but for at least one row. When all rows fit, the weight's gradient is written
/// once in its dtype; otherwise it is summed in the wide dtype. The rules of Forward for ranks,
/// errors and threads apply.
LinearLogprobLoss ForwardWithGradients(const LossCoefficients& coefficients,
                                       const LinearLogprobInputs& inputs,
                                       const LinearLogprobOptions& options, GradientNeeds needs,
                                       int64_t cache_bytes);

/// Multiplies `gradient` in place by `factor`, which has one element. If the factor is 1, memory is
/// not touched, unless the host would have to wait for a device to read the factor.
void ScaleGradient(at::Tensor& gradient, const at::Tensor& factor);

}  // namespace logprobd::torch_ops
