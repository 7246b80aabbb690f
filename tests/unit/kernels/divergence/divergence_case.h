#pragma once

// Rows of logits of a student and a teacher, and their divergences and gradients in double.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/divergence/divergence_math.h"

namespace logprobd::kernels::divergence_case {

inline constexpr DivergenceKind kKinds[] = {DivergenceKind::kForwardKl, DivergenceKind::kReverseKl,
                                            DivergenceKind::kJsd};

/// Logits of one row after scale, bias and cap.
struct RowLogits {
  std::vector<float> student;
  std::vector<float> teacher;
  double temperature = 1;
};

/// Returns a row whose logits have the standard deviation `spread`. The teacher's logits are at a
/// distance of `gap` times the spread from the student's.
inline RowLogits MakeRow(int64_t columns, double spread, double gap, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, spread);
  RowLogits row;
  for (int64_t i = 0; i < columns; ++i) {
    const double student = normal(random);
    row.student.push_back(static_cast<float>(student));
    row.teacher.push_back(static_cast<float>(student + gap * normal(random)));
  }
  return row;
}

/// Natural logarithms of the probabilities.
inline std::vector<double> LogProbabilities(const std::vector<float>& logits, double temperature) {
  double max = -INFINITY;
  for (const float logit : logits) max = std::max(max, logit / temperature);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit / temperature - max);
  std::vector<double> result;
  for (const float logit : logits) result.push_back(logit / temperature - max - std::log(sum));
  return result;
}

inline double LogMixture(double log_s, double log_t, double beta) {
  const double a = std::log1p(-beta) + log_s;
  const double b = std::log(beta) + log_t;
  const double max = std::max(a, b);
  return max == -INFINITY ? max : max + std::log(std::exp(a - max) + std::exp(b - max));
}

inline double Weighted(double p, double value) { return p == 0 ? 0 : p * value; }

struct Truth {
  double divergence = 0;
  double student_share = 0;
  double entropy = 0;
  std::vector<double> d_divergence;  ///< Gradients with respect to z / temperature.
  std::vector<double> d_entropy;
};

inline Truth TruthOf(const RowLogits& row, DivergenceKind kind, double beta) {
  const std::vector<double> log_s = LogProbabilities(row.student, row.temperature);
  const std::vector<double> log_t = LogProbabilities(row.teacher, row.temperature);
  Truth truth;
  double teacher_share = 0;
  std::vector<double> log_q;  // what the student is compared with
  for (size_t i = 0; i < log_s.size(); ++i) {
    log_q.push_back(kind == DivergenceKind::kJsd ? LogMixture(log_s[i], log_t[i], beta) : log_t[i]);
    const double s = std::exp(log_s[i]);
    const double t = std::exp(log_t[i]);
    truth.student_share += Weighted(s, log_s[i] - log_q[i]);
    teacher_share += Weighted(t, log_t[i] - (kind == DivergenceKind::kJsd ? log_q[i] : log_s[i]));
    truth.entropy -= Weighted(s, log_s[i]);
  }
  if (kind == DivergenceKind::kForwardKl) truth.student_share = 0;
  truth.divergence = kind == DivergenceKind::kForwardKl ? teacher_share
                     : kind == DivergenceKind::kReverseKl
                         ? truth.student_share
                         : beta * teacher_share + (1 - beta) * truth.student_share;
  for (size_t i = 0; i < log_s.size(); ++i) {
    const double s = std::exp(log_s[i]);
    const double share = kind == DivergenceKind::kJsd ? 1 - beta : 1;
    truth.d_divergence.push_back(kind == DivergenceKind::kForwardKl
                                     ? s - std::exp(log_t[i])
                                     : share *
                                           Weighted(s, log_s[i] - log_q[i] - truth.student_share));
    truth.d_entropy.push_back(-Weighted(s, log_s[i] + truth.entropy));
  }
  return truth;
}

/// Absolute errors of divergence and entropy in nats: exponentials and logarithms have relative
/// errors of a few 2^-23, and exponents of up to 30 are rounded to 2^-20.
inline constexpr double kNatsTolerance = 3e-6;

/// Returns the relative Frobenius error.
inline double ErrorOf(const std::vector<double>& ours, const std::vector<double>& truth) {
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    error += (ours[i] - truth[i]) * (ours[i] - truth[i]);
    size += truth[i] * truth[i];
  }
  return std::sqrt(error / size);
}

}  // namespace logprobd::kernels::divergence_case
