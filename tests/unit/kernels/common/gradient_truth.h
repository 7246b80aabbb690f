#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/common/row_gradient.h"

// Gradients of a row in double, as a textbook has them, and how far from them a kernel may be.
namespace logprobd::testing {

/// d(loss)/d(score) of a row.
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

/// The softmax of logits over temperature `x`, in nats; those of -inf have no part in it.
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

/// What one column adds to the gradient.
struct ColumnPart {
  bool is_target = false;
  double weight = 0;  ///< Of the mean logit.
};

/// d(loss)/d(x_j), from the derivatives of lse, logprob, entropy and mean logit in turn.
inline double TextbookGradient(const RowSoftmax& row, size_t j, const ScoreGradients& d,
                               const ColumnPart& part) {
  const double p = row.p[j];
  const double d_entropy = p == 0 ? 0.0 : -p * (row.log_p[j] + row.entropy);
  return d.lse * p + d.logprob * ((part.is_target ? 1.0 : 0.0) - p) + d.entropy * d_entropy +
         d.mean_logit * part.weight;
}

/// Error of the above where ln p_j is off by `log_error` and everything else is fp32: each power
/// and each term of the sum within 2^-21 of itself, exponentials below 2^-125 lost.
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

/// Half of the last place of a bf16 or an fp16, subnormals included.
inline double HalfUlp(double value, kernels::Dtype dtype) {
  const bool is_bf16 = dtype == kernels::Dtype::kBf16;
  const int exponent_min = is_bf16 ? -126 : -14;
  const int exponent = value == 0 ? exponent_min : std::max(std::ilogb(value), exponent_min);
  return std::ldexp(1.0, exponent - (is_bf16 ? 8 : 11));
}

}  // namespace logprobd::testing
