#include "kernels/common/row_gradient.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "tests/unit/kernels/common/gradient_truth.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::ColumnPart;
using logprobd::testing::GradientError;
using logprobd::testing::RowSoftmax;
using logprobd::testing::ScoreGradients;
using logprobd::testing::TextbookGradient;
using logprobd::testing::UpstreamOf;

constexpr size_t kColumns = 500;
constexpr size_t kTarget = 123;
constexpr double kScale = 0.75;  // scale of the head

/// Computes the gradient of a column from a row's constants with the operations of the kernels.
float GradientOf(const RowGradient& row, float logit, const ColumnPart& part) {
  float exponent = std::fma(logit, row.log2_scale, -row.log2_sum);
  if (exponent < -200.0F) exponent = -200.0F;  // keeps NaN
  float gradient = std::exp2(exponent) * std::fma(row.weighted, exponent, row.free);
  gradient = std::fma(row.mean, static_cast<float>(part.weight), gradient);
  return part.is_target ? gradient + row.target : gradient;
}

ColumnPart PartOf(size_t column) {
  return {.is_target = column == kTarget,
          .weight = 0.25 * static_cast<double>(column % 9) / static_cast<double>(kColumns)};
}

struct LogitsCase {
  double stddev = 3;
  float temperature = 1;
  double lse_offset = 0;  ///< Offset of lse in nats.
};

/// Makes logits before temperature. The target's logit is the largest.
std::vector<float> MakeLogits(const LogitsCase& c) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0, c.stddev);
  std::vector<float> logits;
  for (size_t i = 0; i < kColumns; ++i) {
    logits.push_back(
        static_cast<float>(normal(random) + c.lse_offset * static_cast<double>(c.temperature)));
  }
  logits[kTarget] = *std::max_element(logits.begin(), logits.end());
  return logits;
}

/// Returns the softmax at the temperature that `log2_scale` represents exactly.
RowSoftmax SoftmaxOf(const std::vector<float>& logits, float log2_scale) {
  std::vector<double> x;
  for (const float logit : logits) {
    x.push_back(static_cast<double>(logit) * static_cast<double>(log2_scale) * kLn2);
  }
  return RowSoftmax(x);
}

struct UpstreamCase {
  std::string name;
  ScoreGradients d;
};

class RowGradientTest : public ::testing::TestWithParam<UpstreamCase> {
 protected:
  static void ExpectTextbookGradients(const LogitsCase& c) {
    const std::vector<float> logits = MakeLogits(c);
    const float log2_scale = Log2Scale(c.temperature);
    const RowSoftmax truth = SoftmaxOf(logits, log2_scale);
    const double gradient_scale = kScale / static_cast<double>(c.temperature);
    const ScoreGradients& d = GetParam().d;

    const RowGradient row =
        RowGradientOf(UpstreamOf(d), truth.lse, truth.entropy, log2_scale, gradient_scale);

    for (size_t j = 0; j < kColumns; ++j) {
      const ColumnPart part = PartOf(j);
      ASSERT_NEAR(GradientOf(row, logits[j], part),
                  gradient_scale * TextbookGradient(truth, j, d, part),
                  gradient_scale * GradientError(truth, j, d, part, 0))
          << "column " << j << ", stddev " << c.stddev << ", temperature " << c.temperature
          << ", lse " << truth.lse;
    }
  }
};

TEST_P(RowGradientTest, MatchesTheTextbookForFlatAndPeakedRowsAtAnyTemperature) {
  for (const double stddev : {1.0, 3.0, 10.0, 20.0}) {
    for (const float temperature : {0.1F, 0.7F, 1.0F, 2.0F}) {
      ExpectTextbookGradients({.stddev = stddev, .temperature = temperature});
    }
  }
}

// Here log2_sum is rounded to about a hundredth of a nat.
TEST_P(RowGradientTest, MatchesTheTextbookForALargeLse) {
  for (const double offset : {7e4, -7e4, 1'234.5}) {
    for (const float temperature : {0.1F, 1.0F, 2.0F}) {
      ExpectTextbookGradients({.temperature = temperature, .lse_offset = offset});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Upstream, RowGradientTest,
                         ::testing::Values(UpstreamCase{"Lse", {.lse = -1.5}},
                                           UpstreamCase{"Logprob", {.logprob = 1}},
                                           UpstreamCase{"Entropy", {.entropy = 0.5}},
                                           UpstreamCase{"MeanLogit", {.mean_logit = 3}},
                                           UpstreamCase{"All", {1.25, -0.75, 0.01, 2}}),
                         [](const auto& info) { return info.param.name; });

TEST(RowGradientOfTest, ProbabilitiesOfARowOfLargeLogitsSumToOne) {
  for (const double offset : {7e4, -7e4}) {
    const std::vector<float> logits = MakeLogits({.lse_offset = offset});
    const float log2_scale = Log2Scale(1);
    const RowSoftmax truth = SoftmaxOf(logits, log2_scale);

    const RowGradient row = RowGradientOf({.free = 1}, truth.lse, truth.entropy, log2_scale, 1);

    double sum = 0;
    for (const float logit : logits) sum += static_cast<double>(GradientOf(row, logit, {}));
    EXPECT_NEAR(sum, 1, 1e-6) << "lse " << truth.lse;
  }
}

TEST(RowGradientOfTest, ColumnsAreInitiallyAbsent) {
  const RowGradient row = RowGradientOf({.free = 1}, 3, 1, Log2Scale(1), 1);

  EXPECT_EQ(row.target_column, -1);
  EXPECT_EQ(row.max_column, -1);
}

TEST(RowGradientOfTest, ANonfiniteRowHasNanGradients) {
  const RowGradient row = RowGradientOf({.free = 1}, NAN, 0, Log2Scale(1), 1);

  EXPECT_TRUE(std::isnan(row.log2_sum));
  EXPECT_TRUE(std::isnan(GradientOf(row, 0.0F, {})));
}

}  // namespace
}  // namespace logprobd::kernels
