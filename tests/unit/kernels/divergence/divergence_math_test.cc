#include "kernels/divergence/divergence_math.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/kernels/divergence/divergence_case.h"

namespace logprobd::kernels {
namespace {

using namespace divergence_case;  // NOLINT: helpers of these tests

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.44269504088896340736;

float ScaleOf(const RowLogits& row) { return static_cast<float>(kLog2E / row.temperature); }

/// Sums a row as the kernel does: each of `num_threads` threads has every num_threads-th group of
/// columns, and the threads' sums are joined.
template <DivergenceKind kKind>
DivergenceStatistics SumRow(const RowLogits& row, size_t num_threads = 7) {
  constexpr size_t kGroup = 8;
  std::vector<DivergenceSums> threads(num_threads);
  const size_t whole = row.student.size() / kGroup;
  for (size_t group = 0; group < whole; ++group) {
    float student[kGroup];
    float teacher[kGroup];
    std::copy_n(&row.student[group * kGroup], kGroup, student);
    std::copy_n(&row.teacher[group * kGroup], kGroup, teacher);
    AddColumns<kKind>(threads[group % num_threads], student, teacher, ScaleOf(row), ScaleOf(row));
  }
  for (size_t i = whole * kGroup; i < row.student.size(); ++i) {
    const float student[1] = {row.student[i]};
    const float teacher[1] = {row.teacher[i]};
    AddColumns<kKind>(threads[i % num_threads], student, teacher, ScaleOf(row), ScaleOf(row));
  }
  DivergenceSums sums;
  for (const DivergenceSums& thread : threads) Join<kKind>(sums, thread);
  return StatisticsOf<kKind>(sums, static_cast<int64_t>(row.student.size()));
}

MixtureShares SharesOf(double beta) {
  return {static_cast<float>(beta), static_cast<float>(1 - beta)};
}

/// Adds what the kernel computes for kJsd from the normalizers.
DivergenceStatistics WithMixture(DivergenceStatistics statistics, const RowLogits& row,
                                 double beta) {
  double student = 0;
  double teacher = 0;
  for (size_t i = 0; i < row.student.size(); ++i) {
    const float log2_s =
        Log2Probability(row.student[i], ScaleOf(row), Split(statistics.student_lse));
    const float log2_t =
        Log2Probability(row.teacher[i], ScaleOf(row), Split(statistics.teacher_lse));
    const MixtureRatios ratios = RatiosToMixture(log2_t - log2_s, SharesOf(beta));
    student += WeightedValue(FastExp2(log2_s), ratios.student);
    teacher += WeightedValue(FastExp2(log2_t), ratios.teacher);
  }
  statistics.student_share = kLn2 * student;
  statistics.divergence = kLn2 * (beta * teacher + (1 - beta) * student);
  return statistics;
}

DivergenceStatistics StatisticsOfKind(const RowLogits& row, DivergenceKind kind, double beta) {
  switch (kind) {
    case DivergenceKind::kForwardKl:
      return SumRow<DivergenceKind::kForwardKl>(row);
    case DivergenceKind::kReverseKl:
      return SumRow<DivergenceKind::kReverseKl>(row);
    case DivergenceKind::kJsd:
      return WithMixture(SumRow<DivergenceKind::kJsd>(row), row, beta);
  }
  return {};
}

std::vector<double> GradientsOf(const RowLogits& row, DivergenceKind kind, double beta,
                                const DivergenceStatistics& statistics, float d_divergence,
                                float d_entropy) {
  const DivergenceGradientRow constants = {ScaleOf(row),
                                           ScaleOf(row),
                                           Split(statistics.student_lse),
                                           Split(statistics.teacher_lse),
                                           SharesOf(beta),
                                           static_cast<float>(statistics.student_share),
                                           static_cast<float>(statistics.entropy),
                                           d_divergence,
                                           d_entropy};
  std::vector<double> gradients;
  for (size_t i = 0; i < row.student.size(); ++i) {
    const float s = row.student[i];
    const float t = row.teacher[i];
    gradients.push_back(kind == DivergenceKind::kForwardKl
                            ? DivergenceGradient<DivergenceKind::kForwardKl>(constants, s, t)
                        : kind == DivergenceKind::kReverseKl
                            ? DivergenceGradient<DivergenceKind::kReverseKl>(constants, s, t)
                            : DivergenceGradient<DivergenceKind::kJsd>(constants, s, t));
  }
  return gradients;
}

void ExpectTruth(const RowLogits& row, double beta, double gradient_error_max) {
  for (const DivergenceKind kind : kKinds) {
    const Truth truth = TruthOf(row, kind, beta);
    const DivergenceStatistics statistics = StatisticsOfKind(row, kind, beta);
    const std::vector<double> d_divergence = GradientsOf(row, kind, beta, statistics, 1, 0);
    const std::vector<double> d_entropy = GradientsOf(row, kind, beta, statistics, 0, 1);

    const double size = 1 + truth.divergence / 10;
    EXPECT_NEAR(statistics.divergence, truth.divergence, kNatsTolerance * size);
    EXPECT_NEAR(statistics.entropy, truth.entropy, kNatsTolerance * 2);
    EXPECT_LT(ErrorOf(d_divergence, truth.d_divergence), gradient_error_max)
        << "kind " << static_cast<int>(kind);
    EXPECT_LT(ErrorOf(d_entropy, truth.d_entropy), 1e-4);
  }
}

// The bound is far below the rounding of a gradient to bf16, 1e-3.
TEST(DivergenceMathTest, MatchesTheTruthForFlatAndPeakedRows) {
  for (const double spread : {0.5, 1.0, 4.0, 10.0}) {
    ExpectTruth(MakeRow(1'003, spread, 0.3, 1), 0.3, 2e-5);
  }
}

TEST(DivergenceMathTest, MatchesTheTruthIfTheModelsNearlyAgree) {
  for (const double gap : {1e-1, 1e-2, 1e-3}) {
    ExpectTruth(MakeRow(1'003, 2, gap, 2), 0.5, 1e-6 / gap);
  }
}

TEST(DivergenceMathTest, MatchesTheTruthForAnyMixture) {
  for (const double beta : {1e-6, 1e-3, 0.1, 0.9, 0.999, 1 - 1e-6}) {
    ExpectTruth(MakeRow(503, 2, 1, 3), beta, 1e-4);
  }
}

TEST(DivergenceMathTest, ScalesWithTheTemperature) {
  for (const double temperature : {0.3, 2.5}) {
    RowLogits row = MakeRow(777, 2, 0.5, 4);
    row.temperature = temperature;
    ExpectTruth(row, 0.4, 2e-5);
  }
}

// An offset is a multiple of 2^-4, so that the logits stay exact.
TEST(DivergenceMathTest, AnOffsetOfTheLogitsChangesLittle) {
  RowLogits row = MakeRow(600, 3, 0.5, 5);
  for (size_t i = 0; i < row.student.size(); ++i) {
    row.student[i] = std::round(row.student[i] * 64) / 64 + 3e4F;
    row.teacher[i] = std::round(row.teacher[i] * 64) / 64 - 3e4F;
  }
  for (const DivergenceKind kind : kKinds) {
    const Truth truth = TruthOf(row, kind, 0.5);
    const DivergenceStatistics statistics = StatisticsOfKind(row, kind, 0.5);
    // log2(e) is rounded to 2^-25, which changes differences of 30 by a millionth.
    EXPECT_NEAR(statistics.divergence, truth.divergence, 2e-5);
    EXPECT_LT(ErrorOf(GradientsOf(row, kind, 0.5, statistics, 1, 0), truth.d_divergence), 1e-3);
  }
}

TEST(DivergenceMathTest, ColumnsThatBothExcludeHaveNoPart) {
  const RowLogits part = MakeRow(300, 2, 0.5, 6);
  RowLogits row = part;
  row.student.resize(400, -kInfinity);
  row.teacher.resize(400, -kInfinity);
  for (const DivergenceKind kind : kKinds) {
    const DivergenceStatistics statistics = StatisticsOfKind(row, kind, 0.5);
    const Truth truth = TruthOf(part, kind, 0.5);

    EXPECT_NEAR(statistics.divergence, truth.divergence, kNatsTolerance);
    EXPECT_NEAR(statistics.entropy, truth.entropy, kNatsTolerance);
    const std::vector<double> gradients = GradientsOf(row, kind, 0.5, statistics, 1, 1);
    for (size_t i = 300; i < 400; ++i) EXPECT_EQ(gradients[i], 0);
  }
}

TEST(DivergenceMathTest, AColumnThatOneExcludesMakesAKlInfinite) {
  RowLogits row = MakeRow(100, 1, 0.5, 7);
  row.student[40] = -kInfinity;

  EXPECT_EQ(SumRow<DivergenceKind::kForwardKl>(row).divergence, kInfinity);
  EXPECT_TRUE(std::isfinite(SumRow<DivergenceKind::kReverseKl>(row).divergence));
  const DivergenceStatistics jsd = StatisticsOfKind(row, DivergenceKind::kJsd, 0.5);
  EXPECT_NEAR(jsd.divergence, TruthOf(row, DivergenceKind::kJsd, 0.5).divergence, kNatsTolerance);
}

TEST(DivergenceMathTest, AValueThatIsNotFiniteGivesNan) {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), kInfinity}) {
    for (const size_t column : {0UL, 50UL, 99UL}) {
      RowLogits row = MakeRow(100, 1, 0.5, 8);
      row.student[column] = value;
      for (const DivergenceKind kind : kKinds) {
        const DivergenceStatistics statistics = StatisticsOfKind(row, kind, 0.5);
        EXPECT_TRUE(std::isnan(statistics.divergence));
        EXPECT_TRUE(std::isnan(statistics.entropy));
        // A coefficient of 0 removes the row.
        for (const double gradient : GradientsOf(row, kind, 0.5, statistics, 0, 0)) {
          EXPECT_EQ(gradient, 0);
        }
      }
      row = MakeRow(100, 1, 0.5, 8);
      row.teacher[column] = value;
      EXPECT_TRUE(std::isnan(SumRow<DivergenceKind::kForwardKl>(row).divergence));
      EXPECT_TRUE(std::isfinite(SumRow<DivergenceKind::kForwardKl>(row).entropy));
    }
  }
}

TEST(DivergenceMathTest, ARowWithoutMassGivesNan) {
  RowLogits row = MakeRow(20, 1, 0.5, 9);
  std::fill(row.student.begin(), row.student.end(), -kInfinity);

  EXPECT_TRUE(std::isnan(SumRow<DivergenceKind::kForwardKl>(row).divergence));
  EXPECT_TRUE(std::isnan(SumRow<DivergenceKind::kReverseKl>(row).divergence));
  EXPECT_TRUE(std::isnan(SumRow<DivergenceKind::kForwardKl>(row).entropy));
}

}  // namespace
}  // namespace logprobd::kernels
