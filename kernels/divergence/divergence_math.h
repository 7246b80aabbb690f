#pragma once

// Arithmetic of a row's divergence, shared by the CUDA kernels and by a test on the CPU. Logarithms
// are to base 2 unless a name says otherwise: with z a logit and c log2(e) / temperature, y = c z.

#include <cmath>
#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/common/row_sums.h"

namespace logprobd::kernels {

/// Divergence of a row, in nats. s and t are the probabilities of student and teacher.
enum class DivergenceKind : int32_t {
  kForwardKl = 0,  ///< KL(t || s), the sum of t (ln t - ln s).
  kReverseKl = 1,  ///< KL(s || t), the sum of s (ln s - ln t).
  /// Generalized Jensen-Shannon divergence, beta KL(t || m) + (1 - beta) KL(s || m), where m is
  /// beta t + (1 - beta) s.
  kJsd = 2,
};

/// What is known of a row after its logits have been read. In nats.
struct DivergenceStatistics {
  double student_lse;    ///< ln of the sum of exp(z / temperature).
  double teacher_lse;    ///< The teacher's.
  double divergence;     ///< >= 0
  double student_share;  ///< KL(s || t) or, for kJsd, KL(s || m); 0 for kForwardKl.
  double entropy;        ///< The student's, in [0, ln of the number of columns].
};

/// Base of sums without a column. Smaller y are relative to this base as well.
inline constexpr float kEmptyBase = -1073741824.0F;

/// Sums over a part of a row, with u = y - base. Bases are whole numbers, and no u is above 0.
struct DivergenceSums {
  float student_base = kEmptyBase;
  float teacher_base = kEmptyBase;
  double student = 0;   ///< Sum of 2^u of the student.
  double weighted = 0;  ///< Sum of u 2^u of the student.
  double teacher = 0;   ///< Sum of 2^u of the teacher.
  /// kForwardKl: sum of 2^u_t (u_t - u_s); kReverseKl: sum of 2^u_s (u_s - u_t); kJsd: 0.
  double gap = 0;
};

/// Returns 2^x with an error of a few ulp; on a GPU 0 below the normal range.
LOGPROBD_HOST_DEVICE inline float FastExp2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

/// Returns log2(x), with an absolute error of at most 2^-22 for x in [1/2, 2].
LOGPROBD_HOST_DEVICE inline float FastLog2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return log2f(x);
#endif
}

/// Returns the larger value, or NaN if either is NaN.
LOGPROBD_HOST_DEVICE inline float LargerOrNan(float a, float b) {
  return a >= b || std::isnan(a) ? a : b;
}

/// Returns weight * value, but 0 if the weight is 0, even if the value is infinite.
template <typename T>
LOGPROBD_HOST_DEVICE inline T WeightedValue(T weight, T value) {
  return weight == T{0} ? T{0} : weight * value;
}

/// Expresses the sums relative to other bases, which are not smaller.
template <DivergenceKind kKind>
LOGPROBD_HOST_DEVICE inline void Rebase(DivergenceSums& sums, float student_base,
                                        float teacher_base) {
  const double student_shift = static_cast<double>(sums.student_base) - student_base;
  const double teacher_shift = static_cast<double>(sums.teacher_base) - teacher_base;
  const double student_factor = exp2(student_shift);
  const double teacher_factor = exp2(teacher_shift);
  if (kKind == DivergenceKind::kForwardKl) {
    const double shifted = sums.gap + WeightedValue(sums.teacher, teacher_shift - student_shift);
    sums.gap = WeightedValue(teacher_factor, shifted);
  } else if (kKind == DivergenceKind::kReverseKl) {
    const double shifted = sums.gap + WeightedValue(sums.student, student_shift - teacher_shift);
    sums.gap = WeightedValue(student_factor, shifted);
  }
  sums.weighted =
      WeightedValue(student_factor, sums.weighted + WeightedValue(sums.student, student_shift));
  sums.student = WeightedValue(student_factor, sums.student);
  sums.teacher = WeightedValue(teacher_factor, sums.teacher);
  sums.student_base = student_base;
  sums.teacher_base = teacher_base;
}

/// Adds the sums of another part of the row.
template <DivergenceKind kKind>
LOGPROBD_HOST_DEVICE inline void Join(DivergenceSums& sums, DivergenceSums other) {
  const float student_base = LargerOrNan(sums.student_base, other.student_base);
  const float teacher_base = LargerOrNan(sums.teacher_base, other.teacher_base);
  Rebase<kKind>(sums, student_base, teacher_base);
  Rebase<kKind>(other, student_base, teacher_base);
  sums.student += other.student;
  sums.weighted += other.weighted;
  sums.teacher += other.teacher;
  sums.gap += other.gap;
}

/// Adds columns with logits `student` and `teacher`; y is a logit times its model's scale. They are
/// summed in fp32 first, then added in fp64.
template <DivergenceKind kKind, int kCount>
LOGPROBD_HOST_DEVICE inline void AddColumns(DivergenceSums& sums, const float (&student)[kCount],
                                            const float (&teacher)[kCount], float student_scale,
                                            float teacher_scale) {
  float student_max = student[0] * student_scale;
  float teacher_max = teacher[0] * teacher_scale;
  for (int i = 1; i < kCount; ++i) {
    student_max = LargerOrNan(student_max, student[i] * student_scale);
    teacher_max = LargerOrNan(teacher_max, teacher[i] * teacher_scale);
  }
  if (!(student_max <= sums.student_base && teacher_max <= sums.teacher_base)) {
    Rebase<kKind>(sums, LargerOrNan(ceilf(student_max), sums.student_base),
                  LargerOrNan(ceilf(teacher_max), sums.teacher_base));
  }
  float student_sum = 0.0F;
  float weighted = 0.0F;
  float teacher_sum = 0.0F;
  float gap = 0.0F;
  for (int i = 0; i < kCount; ++i) {
    const float us = fmaf(student[i], student_scale, -sums.student_base);
    const float ut = fmaf(teacher[i], teacher_scale, -sums.teacher_base);
    const float es = FastExp2(us);
    const float et = FastExp2(ut);
    student_sum += es;
    weighted += WeightedValue(es, us);
    teacher_sum += et;
    if (kKind == DivergenceKind::kForwardKl) gap += WeightedValue(et, ut - us);
    if (kKind == DivergenceKind::kReverseKl) gap += WeightedValue(es, us - ut);
  }
  sums.student += student_sum;
  sums.weighted += weighted;
  sums.teacher += teacher_sum;
  if (kKind != DivergenceKind::kJsd) sums.gap += gap;
}

/// Returns the statistics of a row from the sums over all of its columns. For kJsd the divergence
/// and the student's share are 0: they need the normalizers that this function returns.
template <DivergenceKind kKind>
LOGPROBD_HOST_DEVICE inline DivergenceStatistics StatisticsOf(const DivergenceSums& sums,
                                                              int64_t num_columns) {
  const double student_log2 = log2(sums.student);
  const double teacher_log2 = log2(sums.teacher);
  // The logarithm of an empty sum makes the other values NaN.
  DivergenceStatistics statistics;
  statistics.student_lse = kLn2 * (sums.student_base + student_log2);
  statistics.teacher_lse = kLn2 * (sums.teacher_base + teacher_log2);
  statistics.divergence = 0;
  if (kKind == DivergenceKind::kForwardKl) {
    statistics.divergence = kLn2 * (sums.gap / sums.teacher - teacher_log2 + student_log2);
  } else if (kKind == DivergenceKind::kReverseKl) {
    statistics.divergence = kLn2 * (sums.gap / sums.student - student_log2 + teacher_log2);
  }
  statistics.student_share = kKind == DivergenceKind::kReverseKl ? statistics.divergence : 0;
  if (statistics.divergence < 0) statistics.divergence = 0;
  statistics.entropy = kLn2 * (student_log2 - sums.weighted / sums.student);
  const double entropy_max = log(static_cast<double>(num_columns));
  if (statistics.entropy < 0) statistics.entropy = 0;
  if (statistics.entropy > entropy_max) statistics.entropy = entropy_max;
  return statistics;
}

/// log2 of the sum of 2^y of a row, as a whole number and a rest in (-1, 0], so that its rounding
/// to fp32 does not grow with the logits.
struct SplitNormalizer {
  float whole;
  float rest;
};
LOGPROBD_HOST_DEVICE inline SplitNormalizer Split(double lse) {
  const double log2_sum = lse / kLn2;
  const double whole = ceil(log2_sum);
  return {static_cast<float>(whole), static_cast<float>(log2_sum - whole)};
}

/// Returns log2 of the probability of a logit.
LOGPROBD_HOST_DEVICE inline float Log2Probability(float logit, float log2_scale,
                                                  const SplitNormalizer& normalizer) {
  return fmaf(logit, log2_scale, -normalizer.whole) - normalizer.rest;
}

/// The mixture m = teacher t + student s of kJsd.
struct MixtureShares {
  float teacher;  ///< beta
  float student;  ///< 1 - beta, rounded once.
};

/// log2 of the ratios of a column's probabilities to the mixture.
struct MixtureRatios {
  float student;  ///< log2(s / m)
  float teacher;  ///< log2(t / m)
};

/// Largest |w| for which Log2OfOnePlusSmall has an error of 2^-26.
inline constexpr float kSmallRest = 0.015625F;

/// Returns log2(1 + w) for |w| < kSmallRest without the rounding error of the sum.
LOGPROBD_HOST_DEVICE inline float Log2OfOnePlusSmall(float w) {
  // ln(1 + w) = w (1 - w/2 + w^2/3 - w^3/4 + ...)
  const float series = fmaf(w, fmaf(w, fmaf(w, -0.25F, 0.333333333F), -0.5F), 1.0F);
  return 1.44269504F * w * series;
}

/// `gap` is log2(t / s). With q the share of the model whose probability is smaller and r <= 1 the
/// quotient of the probabilities, m is the larger one times 1 + q (r - 1), and the smaller one
/// times 1 + (1 - q) (1/r - 1). Logarithms near 0 keep their relative precision, so that gradients
/// do if beta is near 0 or 1.
LOGPROBD_HOST_DEVICE inline MixtureRatios RatiosToMixture(float gap, const MixtureShares& shares) {
  const bool is_student_larger = gap <= 0.0F;
  const float q = is_student_larger ? shares.teacher : shares.student;
  const float rest = is_student_larger ? shares.student : shares.teacher;
  const float distance = fabsf(gap);
  const float r = FastExp2(-distance);
  const float w = fmaf(q, r, -q);
  const float larger = fabsf(w) < kSmallRest ? -Log2OfOnePlusSmall(w) : -FastLog2(fmaf(q, r, rest));
  const float excess = rest * (FastExp2(distance) - 1.0F);
  const float smaller = excess < kSmallRest ? -Log2OfOnePlusSmall(excess) : larger - distance;
  return is_student_larger ? MixtureRatios{larger, smaller} : MixtureRatios{smaller, larger};
}

/// Constants of the gradient of a row, rounded to fp32.
struct DivergenceGradientRow {
  float student_scale;  ///< y / logit
  float teacher_scale;
  SplitNormalizer student;
  SplitNormalizer teacher;
  MixtureShares shares;
  float student_share;  ///< See DivergenceStatistics.
  float entropy;
  float d_divergence;  ///< Upstream gradients times d(z / temperature) / d(dot product), no cap.
  float d_entropy;
};

/// Returns the gradient with respect to the student's dot product of a column without a cap.
template <DivergenceKind kKind>
LOGPROBD_HOST_DEVICE inline float DivergenceGradient(const DivergenceGradientRow& row,
                                                     float student_logit, float teacher_logit) {
  constexpr auto kLn2Float = static_cast<float>(kLn2);
  const float log2_s = Log2Probability(student_logit, row.student_scale, row.student);
  const float s = FastExp2(log2_s);
  float gradient = 0.0F;
  // A coefficient of 0 removes its part even if that is NaN.
  if (row.d_divergence != 0.0F) {
    const float log2_t = Log2Probability(teacher_logit, row.teacher_scale, row.teacher);
    float part;
    if (kKind == DivergenceKind::kForwardKl) {
      part = s - FastExp2(log2_t);
    } else if (kKind == DivergenceKind::kReverseKl) {
      part = WeightedValue(s, fmaf(kLn2Float, log2_s - log2_t, -row.student_share));
    } else {
      const MixtureRatios ratios = RatiosToMixture(log2_t - log2_s, row.shares);
      part = row.shares.student *
             WeightedValue(s, fmaf(kLn2Float, ratios.student, -row.student_share));
    }
    gradient = row.d_divergence * part;
  }
  if (row.d_entropy != 0.0F) {
    gradient -= row.d_entropy * WeightedValue(s, fmaf(kLn2Float, log2_s, row.entropy));
  }
  return gradient;
}

}  // namespace logprobd::kernels
