#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/common/row_gradient.h"

// Gradients of a row in double precision from textbook formulas, and error bounds for kernels.
namespace logprobd::testing {

/// Gradients of the loss with respect to the scores of a row.
struct ScoreGradients {
  double lse = 0;
  double logprob = 0;
  double entropy = 0;
  double mean_logit = 0;
};

inline kernels::RowUpstream UpstreamOf(const ScoreGradients& d) {
  return {
      .free = d.lse - d.logprob, .entropy = d.entropy, .target = d.logprob, .mean = d.mean_logit};
}

/// Softmax of x, the logits divided by temperature, in nats. Entries of -inf have probability 0.
struct RowSoftmax {
  explicit RowSoftmax(const std::vector<double>& x) {
    double largest = -std::numeric_limits<double>::infinity();
    for (const double value : x) largest = std::isnan(value) ? value : std::fmax(largest, value);
    double sum = 0;
    for (const double value : x) sum += std::exp(value - largest);
    lse = largest + std::log(sum);
    for (const double value : x) {
      log_p.push_back(value - lse);
      p.push_back(std::exp(log_p.back()));
      if (p.back() != 0) entropy -= p.back() * log_p.back();
    }
  }

  double lse = 0;
  double entropy = 0;
  std::vector<double> log_p;
  std::vector<double> p;
};

/// Properties of one column that affect its gradient.
struct ColumnPart {
  bool is_target = false;
  double weight = 0;  ///< Weight in the mean logit.
};

/// Returns d(loss)/d(x_j) as the sum over the derivatives of lse, logprob, entropy and mean logit.
inline double TextbookGradient(const RowSoftmax& row, size_t j, const ScoreGradients& d,
                               const ColumnPart& part) {
  const double p = row.p[j];
  const double d_entropy = p == 0 ? 0.0 : -p * (row.log_p[j] + row.entropy);
  return d.lse * p + d.logprob * ((part.is_target ? 1.0 : 0.0) - p) + d.entropy * d_entropy +
         d.mean_logit * part.weight;
}

/// Returns a bound for the error of TextbookGradient if ln p_j has the error `log_error` and
/// everything else is computed in fp32: exponentials and terms of the sum have a relative error of
/// 2^-21, and exponentials below 2^-125 become 0.
inline double GradientError(const RowSoftmax& row, size_t j, const ScoreGradients& d,
                            const ColumnPart& part, double log_error) {
  constexpr double kFp32 = 0x1p-21;
  const double p = row.p[j];
  const double free = std::fabs(d.lse - d.logprob);
  const double entropy = std::fabs(d.entropy);
  const double target = part.is_target ? std::fabs(d.logprob) : 0.0;
  const double lost = 0x1p-125 * (free + entropy * (125 + row.entropy));
  const double error = kFp32 * (target + std::fabs(d.mean_logit * part.weight)) + lost;
  if (p == 0) return error;
  const double log_p = std::fabs(row.log_p[j]);
  const double factor = free + entropy * (log_p + row.entropy);
  const double of_p = std::expm1(log_error) + kFp32 * (2 + log_p);
  return error + p * (factor * of_p + entropy * log_error);
}

/// Returns half a unit in the last place of a bf16 or fp16 value, including subnormals.
inline double HalfUlp(double value, kernels::Dtype dtype) {
  const bool is_bf16 = dtype == kernels::Dtype::kBf16;
  const int exponent_min = is_bf16 ? -126 : -14;
  const int exponent = value == 0 ? exponent_min : std::max(std::ilogb(value), exponent_min);
  return std::ldexp(1.0, exponent - (is_bf16 ? 8 : 11));
}

}  // namespace logprobd::testing
