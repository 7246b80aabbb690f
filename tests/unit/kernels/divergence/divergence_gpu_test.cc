#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/divergence/divergence.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/divergence/divergence_case.h"
#include "tests/unit/kernels/fused/sixteen_bits.h"

namespace logprobd::kernels {
namespace {

using namespace divergence_case;  // NOLINT: helpers of these tests
using logprobd::testing::DeviceArray;

class DivergenceTest : public testing::GpuTest {};

/// What a case applies to the dot products of both models. The rows' logits are those after it.
struct Head {
  float scale = 1;
  float softcap = 0;
  bool has_bias = false;
};

struct Result {
  std::vector<DivergenceStatistics> statistics;
  std::vector<std::vector<double>> gradients;  // [row][column]
};

/// Upstream gradients of every row.
struct Upstream {
  std::optional<double> divergence = 1.0;
  std::optional<double> entropy = std::nullopt;
};

/// Runs both kernels on rows of equal length. With a bias, column i has the bias i % 5.
Result RunKernels(const std::vector<RowLogits>& rows, DivergenceKind kind, double beta,
                  const Upstream& upstream, Dtype dtype = Dtype::kF32, const Head& head = {}) {
  const size_t columns = rows[0].student.size();
  const size_t stride = (columns + 3) / 4 * 4 + 4;
  constexpr float kUnread = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> student(rows.size() * stride, kUnread);
  std::vector<float> teacher(rows.size() * stride, kUnread);
  std::vector<float> bias(columns);
  std::vector<double> temperatures;
  for (size_t i = 0; i < columns; ++i) bias[i] = head.has_bias ? static_cast<float>(i % 5) : 0.0F;
  const auto dot_of = [&](float logit, size_t column) {
    const double z =
        head.softcap > 0 ? head.softcap * std::atanh(logit / head.softcap) : double{logit};
    return static_cast<float>((z - bias[column]) / head.scale);
  };
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t i = 0; i < columns; ++i) {
      student[row * stride + i] = dot_of(rows[row].student[i], i);
      teacher[row * stride + i] = dot_of(rows[row].teacher[i], i);
    }
    temperatures.push_back(rows[row].temperature);
  }
  const DeviceArray<float> student_array(student);
  const DeviceArray<float> teacher_array(teacher);
  const DeviceArray<float> bias_array(bias);
  const DeviceArray<double> temperature_array(temperatures);
  const DeviceArray<DivergenceStatistics> statistics(
      std::vector<DivergenceStatistics>(rows.size()));
  DivergenceGradientParams params;
  params.rows.num_rows = static_cast<int64_t>(rows.size());
  params.rows.num_columns = static_cast<int64_t>(columns);
  params.rows.kind = kind;
  params.rows.beta = beta;
  const auto model = [&](const DeviceArray<float>& dots) {
    DivergenceModel result;
    result.dots = dots.data();
    result.row_stride = static_cast<int64_t>(stride);
    result.bias = head.has_bias ? bias_array.data() : nullptr;
    result.transform = {head.scale, head.softcap};
    return result;
  };
  params.rows.student = model(student_array);
  params.rows.teacher = model(teacher_array);
  params.rows.temperatures = temperature_array.data();
  EXPECT_EQ(LaunchDivergenceSums(params.rows, statistics.data(), nullptr), cudaSuccess);

  const auto coefficients = [&](const std::optional<double>& value) {
    return std::vector<double>(rows.size(), value.value_or(0));
  };
  const DeviceArray<double> d_divergence(coefficients(upstream.divergence));
  const DeviceArray<double> d_entropy(coefficients(upstream.entropy));
  params.statistics = statistics.data();
  if (upstream.divergence.has_value()) params.d_divergence = d_divergence.data();
  if (upstream.entropy.has_value()) params.d_entropy = d_entropy.data();
  params.dtype = dtype;
  params.gradient_stride = static_cast<int64_t>(stride);
  const bool is_wide = dtype == Dtype::kF32;
  const DeviceArray<float> wide(std::vector<float>(is_wide ? rows.size() * stride : 1));
  const DeviceArray<uint16_t> narrow(std::vector<uint16_t>(is_wide ? 1 : rows.size() * stride));
  params.gradients = is_wide ? static_cast<void*>(wide.data()) : narrow.data();
  EXPECT_EQ(LaunchDivergenceGradient(params, nullptr), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  Result result;
  result.statistics = statistics.Read();
  const std::vector<float> wide_values = wide.Read();
  const std::vector<uint16_t> narrow_values = narrow.Read();
  for (size_t row = 0; row < rows.size(); ++row) {
    std::vector<double>& gradients = result.gradients.emplace_back();
    for (size_t i = 0; i < columns; ++i) {
      const size_t at = row * stride + i;
      gradients.push_back(is_wide ? double{wide_values[at]}
                                  : double{testing::FromBits(narrow_values[at], dtype)});
    }
    // Columns after the last one are not written.
    EXPECT_EQ(is_wide ? wide_values[row * stride + columns] : 0.0F, 0.0F);
  }
  return result;
}

/// Relative errors of gradients: fp32 exponents of up to 30, and the rounding to the dtype.
double GradientErrorMax(Dtype dtype) {
  return dtype == Dtype::kF32 ? 5e-5 : dtype == Dtype::kF16 ? 1e-3 : 2.5e-3;
}

void ExpectTruth(const std::vector<RowLogits>& rows, double beta, Dtype dtype = Dtype::kF32,
                 const Head& head = {}) {
  for (const DivergenceKind kind : kKinds) {
    const Result of_divergence = RunKernels(rows, kind, beta, {.divergence = 2}, dtype, head);
    const Result of_both =
        RunKernels(rows, kind, beta, {.divergence = 2, .entropy = -0.5}, Dtype::kF32, head);
    for (size_t row = 0; row < rows.size(); ++row) {
      const Truth truth = TruthOf(rows[row], kind, beta);
      const DivergenceStatistics& statistics = of_divergence.statistics[row];
      // A cap adds errors of a few 2^-22 of a logit.
      const double cap_factor = head.softcap > 0 ? 4 : 1;
      const double size = cap_factor * (1 + truth.divergence / 10);
      EXPECT_NEAR(statistics.divergence, truth.divergence, 2 * kNatsTolerance * size);
      EXPECT_NEAR(statistics.entropy, truth.entropy, 2 * kNatsTolerance * cap_factor);
      std::vector<double> divergence_gradient;
      std::vector<double> both_gradient;
      for (size_t i = 0; i < truth.d_divergence.size(); ++i) {
        const double share = head.softcap > 0 ? rows[row].student[i] / head.softcap : 0;
        const double slope = head.scale / rows[row].temperature * (1 - share * share);
        divergence_gradient.push_back(2 * truth.d_divergence[i] * slope);
        both_gradient.push_back((2 * truth.d_divergence[i] - 0.5 * truth.d_entropy[i]) * slope);
      }
      EXPECT_LT(ErrorOf(of_divergence.gradients[row], divergence_gradient), GradientErrorMax(dtype))
          << "kind " << static_cast<int>(kind) << ", row " << row;
      EXPECT_LT(ErrorOf(of_both.gradients[row], both_gradient),
                cap_factor * GradientErrorMax(Dtype::kF32));
    }
  }
}

std::vector<RowLogits> MakeRows(int64_t columns, double gap = 0.3) {
  std::vector<RowLogits> rows;
  for (const double spread : {0.5, 2.0, 8.0}) {
    rows.push_back(MakeRow(columns, spread, gap, static_cast<uint32_t>(rows.size() + 1)));
    rows.back().temperature = 0.5 + 0.4 * static_cast<double>(rows.size());
  }
  return rows;
}

// At the edges of a vector, of a block's vectors, of two of these, and of the gradient's columns.
TEST_F(DivergenceTest, MatchesTheTruthAtVocabularyEdges) {
  for (const int64_t columns : {2, 3, 4, 5, 1'023, 1'024, 1'025, 2'049, 4'095, 4'097, 8'300}) {
    ExpectTruth(MakeRows(columns), 0.3);
  }
}

TEST_F(DivergenceTest, RoundsGradientsToTheirDtype) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) ExpectTruth(MakeRows(1'001), 0.5, dtype);
}

TEST_F(DivergenceTest, MatchesTheTruthWithATransform) {
  ExpectTruth(MakeRows(1'001), 0.5, Dtype::kF32, {.scale = -0.7F});
  ExpectTruth(MakeRows(1'001), 0.5, Dtype::kF32, {.scale = 1.5F, .has_bias = true});
  ExpectTruth(MakeRows(1'001), 0.5, Dtype::kBf16, {.scale = 1.5F, .softcap = 60, .has_bias = true});
}

TEST_F(DivergenceTest, ARowThatIsNotFiniteDoesNotAffectOthers) {
  std::vector<RowLogits> rows = MakeRows(700);
  const Result clean = RunKernels(rows, DivergenceKind::kJsd, 0.5, {});
  rows[1].student[333] = std::numeric_limits<float>::quiet_NaN();

  const Result result = RunKernels(rows, DivergenceKind::kJsd, 0.5, {});

  EXPECT_TRUE(std::isnan(result.statistics[1].divergence));
  for (const size_t row : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(result.statistics[row].divergence, clean.statistics[row].divergence);
    EXPECT_EQ(result.gradients[row], clean.gradients[row]);
  }
  const Result unused = RunKernels(rows, DivergenceKind::kJsd, 0.5, {.divergence = 0});
  for (const double gradient : unused.gradients[1]) EXPECT_EQ(gradient, 0);
}

TEST_F(DivergenceTest, RefusesParametersThatAreOutOfRange) {
  const DeviceArray<float> dots(std::vector<float>(64));
  const DeviceArray<double> temperatures(std::vector<double>(1, 1.0));
  const DeviceArray<DivergenceStatistics> statistics(std::vector<DivergenceStatistics>(1));
  DivergenceRowsParams params;
  params.num_rows = 1;
  params.num_columns = 30;
  params.student.dots = params.teacher.dots = dots.data();
  params.student.row_stride = params.teacher.row_stride = 32;
  params.temperatures = temperatures.data();
  const auto launch = [&](const DivergenceRowsParams& changed) {
    return LaunchDivergenceSums(changed, statistics.data(), nullptr);
  };
  ASSERT_EQ(launch(params), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  DivergenceRowsParams changed = params;
  changed.student.row_stride = 31;
  EXPECT_EQ(launch(changed), cudaErrorInvalidValue);
  changed = params;
  changed.teacher.dots = dots.data() + 1;
  EXPECT_EQ(launch(changed), cudaErrorInvalidValue);
  changed = params;
  changed.kind = DivergenceKind::kJsd;
  changed.beta = 1;
  EXPECT_EQ(launch(changed), cudaErrorInvalidValue);
  changed = params;
  changed.temperatures = nullptr;
  EXPECT_EQ(launch(changed), cudaErrorInvalidValue);
  changed = params;
  changed.num_rows = 0;
  EXPECT_EQ(launch(changed), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::kernels
