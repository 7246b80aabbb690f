#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <tuple>

#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

/// Coefficient of a score in a loss. That of a row's score is the product of a value and the
/// factor.
struct Coefficient {
  MaybeTensor values;  ///< Shaped like target; absent: 1 for every row.
  double factor = 0;   ///< 0: the score is not part of the loss.
};

/// Coefficients of the scores in a loss.
struct LossCoefficients {
  Coefficient logprob;
  Coefficient entropy;
  Coefficient lse;
  Coefficient mean_logit;
  bool is_mean = false;  ///< True: the loss is divided by the number of valid rows, at least 1.

  static constexpr auto Fields() {
    using Coef = LossCoefficients;
    constexpr auto kValues = &Coefficient::values;
    constexpr auto kFactor = &Coefficient::factor;
    return std::tuple{PartField{"logprob_coef", &Coef::logprob, kValues},
                      PartField{"logprob_factor", &Coef::logprob, kFactor},
                      PartField{"entropy_coef", &Coef::entropy, kValues},
                      PartField{"entropy_factor", &Coef::entropy, kFactor},
                      PartField{"lse_coef", &Coef::lse, kValues},
                      PartField{"lse_factor", &Coef::lse, kFactor},
                      PartField{"mean_logit_coef", &Coef::mean_logit, kValues},
                      PartField{"mean_logit_factor", &Coef::mean_logit, kFactor},
                      Field{"is_mean", &Coef::is_mean}};
  }
};

/// A score that can be part of a loss.
struct LossScore {
  const char* name;  ///< The argument with its coefficient.
  Coefficient LossCoefficients::*coefficient;
  at::Tensor LinearLogprobOutputs::*output;
  MaybeTensor UpstreamGradients::*upstream;
};
/// In the order of kUpstreamScores.
inline constexpr std::array<LossScore, 4> kLossScores = {
    {{"logprob_coef", &LossCoefficients::logprob, &LinearLogprobOutputs::logprob,
      &UpstreamGradients::logprob},
     {"entropy_coef", &LossCoefficients::entropy, &LinearLogprobOutputs::entropy,
      &UpstreamGradients::entropy},
     {"lse_coef", &LossCoefficients::lse, &LinearLogprobOutputs::lse, &UpstreamGradients::lse},
     {"mean_logit_coef", &LossCoefficients::mean_logit, &LinearLogprobOutputs::mean_logit,
      &UpstreamGradients::mean_logit}}};

/// One loss of all rows, and its gradients with respect to the inputs.
struct LinearLogprobLoss {
  at::Tensor loss;              ///< [], in the wide dtype.
  LinearLogprobOutputs scores;  ///< Scores of all rows, without lse_rest and cache.
  InputGradients gradients;

  static constexpr auto Fields() {
    using Loss = LinearLogprobLoss;
    return std::tuple_cat(std::tuple{Field{"loss", &Loss::loss}},
                          FieldsOf(&Loss::scores, LinearLogprobOutputs::Scores()),
                          FieldsOf(&Loss::gradients));
  }
};

}  // namespace logprobd::torch_ops
