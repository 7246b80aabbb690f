#include "kernels/cpu/tile_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/kernels/cpu/dot_kernel_checks.h"

namespace logprobd::kernels {
namespace {

class TileKernelsTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!CpuIsaRuns(GetParam())) GTEST_SKIP() << "this CPU has no " << CpuIsaName(GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(All, TileKernelsTest, ::testing::ValuesIn(kAllCpuIsas),
                         [](const auto& info) { return std::string(CpuIsaName(info.param)); });

TEST_P(TileKernelsTest, DotProductsAreExactAndDoNotDependOnOtherRows) {
  for (const Dtype hidden : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Dtype weight : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      SCOPED_TRACE(::testing::Message() << "hidden dtype " << static_cast<int>(hidden)
                                        << ", weight dtype " << static_cast<int>(weight));
      testing::CheckDotKernel(DotKernelFor(GetParam(), hidden, weight), hidden, weight);
    }
  }
}

/// A tile of logits and the results of TileStats.
struct StatsCase {
  explicit StatsCase(int64_t rows)
      : num_rows(rows),
        logits(static_cast<size_t>(rows * kTileColumns)),
        scales(static_cast<size_t>(rows), Log2Scale(1)),
        sums(static_cast<size_t>(rows)),
        entropy_sums(static_cast<size_t>(rows)),
        extremes(static_cast<size_t>(rows)) {
    for (size_t i = 0; i < logits.size(); ++i) {
      logits[i] = 5.0F * std::sin(static_cast<float>(i) * 1.37F);
    }
  }

  CpuTileStatsParams Params() {
    CpuTileStatsParams params{};
    params.logits = logits.data();
    params.num_rows = num_rows;
    params.num_columns = kTileColumns;
    params.log2_scales = scales.data();
    params.wants_sum_squares = true;
    params.wants_extremes = true;
    params.sums = sums.data();
    params.extremes = extremes.data();
    return params;
  }

  int64_t num_rows;
  std::vector<float> logits;
  std::vector<float> scales;
  std::vector<TileSums> sums;
  std::vector<TileSums> entropy_sums;
  std::vector<TileExtremes> extremes;
};

void ExpectSumsOf(const TileSums& sums, const float* logits, int32_t num_columns, float scale) {
  double sum = 0;
  double weighted = 0;
  double squares = 0;
  for (int32_t column = 0; column < num_columns; ++column) {
    const double x =
        static_cast<double>(logits[column]) * static_cast<double>(scale) - sums.exponent;
    sum += std::exp2(x);
    weighted += x * std::exp2(x);
    squares += std::exp2(2 * x);
  }
  EXPECT_EQ(sums.exponent, TileExponent(*std::max_element(logits, logits + num_columns), scale));
  EXPECT_NEAR(sums.sum, sum, 1e-6 * sum);
  EXPECT_NEAR(sums.weighted, weighted, 2e-6 * std::fabs(weighted) + 1e-6);
  EXPECT_NEAR(sums.sum_squares, squares, 1e-6 * squares);
}

TEST_P(TileKernelsTest, SumsMatchDouble) {
  for (const int64_t rows : {1, 3, 4, 8, 15, 16, 17, 40}) {
    StatsCase c(rows);
    c.scales[0] = Log2Scale(0.01F);
    c.scales.back() = Log2Scale(7.0F);

    TileStatsFor(GetParam())(c.Params());

    for (int64_t row = 0; row < rows; ++row) {
      const auto i = static_cast<size_t>(row);
      SCOPED_TRACE(::testing::Message() << rows << " rows, row " << row);
      const float* logits = &c.logits[i * kTileColumns];
      ExpectSumsOf(c.sums[i], logits, kTileColumns, c.scales[i]);
      EXPECT_EQ(c.extremes[i].argmax, std::max_element(logits, logits + kTileColumns) - logits);
      EXPECT_EQ(c.extremes[i].min_logit, *std::min_element(logits, logits + kTileColumns));
    }
  }
}

TEST_P(TileKernelsTest, ColumnsBeyondTheVocabularyAreIgnored) {
  for (const int32_t num_columns : {1, 15, 16, 17, 100, 191}) {
    StatsCase c(3);
    std::fill(c.logits.begin() + kTileColumns + num_columns, c.logits.begin() + 2 * kTileColumns,
              std::numeric_limits<float>::quiet_NaN());
    CpuTileStatsParams params = c.Params();
    params.num_columns = num_columns;
    params.first_column = 1920;

    TileStatsFor(GetParam())(params);

    const float* logits = &c.logits[kTileColumns];
    ExpectSumsOf(c.sums[1], logits, num_columns, c.scales[1]);
    EXPECT_EQ(c.extremes[1].argmax,
              1920 + (std::max_element(logits, logits + num_columns) - logits));
    EXPECT_EQ(c.extremes[1].min_logit, *std::min_element(logits, logits + num_columns));
  }
}

TEST_P(TileKernelsTest, RankCountsAreThoseOfLogitsAboveTheTarget) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int32_t num_columns : {1, 15, 17, 100, 191, 192}) {
    // Targets before, in and after the tile, whose columns are 384 to 575.
    const std::vector<int32_t> targets = {0, 383, 384, 400, 384 + num_columns - 1, 576, 5'000, 9};
    StatsCase c(static_cast<int64_t>(targets.size()));
    for (float& z : c.logits) z = std::round(z);  // many ties
    std::vector<float> target_logits = {0, -0.0F, 3, -5, 5, 0, -7, -kInfinity};
    std::fill_n(c.logits.begin() + 7 * kTileColumns, 10, -kInfinity);
    for (size_t row = 2; row < 5; ++row) {  // a target in the tile has the logit of its column
      const auto column = static_cast<size_t>(targets[row] - 384);
      target_logits[row] = c.logits[row * kTileColumns + column];
    }
    std::vector<int32_t> counts(targets.size(), -77);
    CpuTileStatsParams params = c.Params();
    params.first_column = 384;
    params.num_columns = num_columns;
    params.target_logits = target_logits.data();
    params.targets = targets.data();
    params.rank_counts = counts.data();

    TileStatsFor(GetParam())(params);

    for (size_t row = 0; row < targets.size(); ++row) {
      int32_t expected = 0;
      for (int32_t column = 0; column < num_columns; ++column) {
        const float z = c.logits[row * kTileColumns + static_cast<size_t>(column)];
        expected +=
            z > target_logits[row] || (z == target_logits[row] && 384 + column < targets[row]);
      }
      EXPECT_EQ(counts[row], expected) << num_columns << " columns, row " << row;
    }
  }
}

TEST_P(TileKernelsTest, EqualLogitsGiveWholeNumbers) {
  StatsCase c(2);
  std::fill(c.logits.begin(), c.logits.end(), 0.0F);

  TileStatsFor(GetParam())(c.Params());

  EXPECT_EQ(c.sums[0].exponent, 0);
  EXPECT_EQ(c.sums[0].sum, 192.0F);
  EXPECT_EQ(c.sums[0].weighted, 0.0F);
  EXPECT_EQ(c.sums[0].sum_squares, 192.0F);
  EXPECT_EQ(c.extremes[0].argmax, 0);
}

TEST_P(TileKernelsTest, OneLogitAmongNegativeInfinitiesIsCertain) {
  StatsCase c(1);
  std::fill(c.logits.begin(), c.logits.end(), -std::numeric_limits<float>::infinity());
  c.logits[100] = 0.0F;

  TileStatsFor(GetParam())(c.Params());

  EXPECT_EQ(c.sums[0].exponent, 0);
  EXPECT_EQ(c.sums[0].sum, 1.0F);
  EXPECT_NEAR(c.sums[0].weighted, 0.0F, 1e-20F);  // far below the row's quantum of 2^-42
  EXPECT_EQ(c.extremes[0].argmax, 100);
}

TEST_P(TileKernelsTest, NonfiniteLogitsAreMarkedOnTheirRowOnly) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (size_t column = 0; column < kTileColumns; ++column) {
    StatsCase c(6);
    c.logits[1 * kTileColumns + column] = kNan;
    c.logits[2 * kTileColumns + column] = kInfinity;
    std::fill_n(&c.logits[3 * kTileColumns], kTileColumns, -kInfinity);
    std::fill_n(&c.logits[4 * kTileColumns], kTileColumns, -kInfinity);
    c.logits[4 * kTileColumns + column] = kNan;

    TileStatsFor(GetParam())(c.Params());

    ASSERT_EQ(c.sums[1].exponent, kNonfiniteExponent) << column;
    ASSERT_EQ(c.sums[2].exponent, kNonfiniteExponent) << column;
    ASSERT_EQ(c.sums[3].exponent, kEmptyExponent) << column;
    ASSERT_EQ(c.sums[4].exponent, kNonfiniteExponent) << column;
    ASSERT_TRUE(std::isfinite(c.sums[0].sum) && std::isfinite(c.sums[5].sum)) << column;
  }
}

TEST_P(TileKernelsTest, TheEntropyScaleGivesTheBitsThatItGivesAlone) {
  StatsCase c(20);
  std::vector<float> entropy_scales(20, Log2Scale(0.3F));
  entropy_scales[7] = c.scales[7];
  CpuTileStatsParams params = c.Params();
  params.entropy_log2_scales = entropy_scales.data();
  params.entropy_sums = c.entropy_sums.data();
  StatsCase alone(20);
  alone.scales = entropy_scales;

  TileStatsFor(GetParam())(params);
  TileStatsFor(GetParam())(alone.Params());

  for (size_t row = 0; row < 20; ++row) {
    EXPECT_EQ(c.entropy_sums[row].sum, alone.sums[row].sum);
    EXPECT_EQ(c.entropy_sums[row].weighted, alone.sums[row].weighted);
  }
  EXPECT_EQ(c.entropy_sums[7].sum, c.sums[7].sum);
}

TEST_P(TileKernelsTest, TransformsAreScaleThenBiasThenCap) {
  for (const float softcap : {0.0F, 0.5F, 5.0F, 30.0F, 1e6F}) {
    StatsCase c(2);
    const std::vector<float> dots = c.logits;
    std::vector<float> bias(kTileColumns);
    for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i) * 0.25F - 24.0F;
    CpuTileStatsParams params = c.Params();
    params.transform = {.scale = 0.75F, .softcap = softcap};
    params.bias = bias.data();

    TileStatsFor(GetParam())(params);

    for (size_t i = 0; i < dots.size(); ++i) {
      double z = 0.75 * static_cast<double>(dots[i]) + static_cast<double>(bias[i % kTileColumns]);
      if (softcap > 0) z = softcap * std::tanh(z / static_cast<double>(softcap));
      ASSERT_NEAR(c.logits[i], z, 3e-7 * std::fabs(z) + 1e-6) << "cap " << softcap;
    }
  }
}

}  // namespace
}  // namespace logprobd::kernels
