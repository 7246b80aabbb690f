#include "kernels/cpu/tile_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
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

/// Returns the value of an f16 by its definition.
double HalfValue(uint32_t bits) {
  const auto exponent = static_cast<int>(bits >> 10 & 0x1F);
  const double fraction = static_cast<double>(bits & 0x3FF) / 1024;
  double value =
      exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
  if (exponent == 31) value = fraction == 0 ? HUGE_VAL : NAN;
  return (bits & 0x8000) != 0 ? -value : value;
}

TEST_P(TileKernelsTest, EveryF16IsConvertedExactly) {
  const DotKernel& of_hidden = DotKernelFor(GetParam(), Dtype::kF16, Dtype::kF32);
  const DotKernel& of_weight = DotKernelFor(GetParam(), Dtype::kF32, Dtype::kF16);
  const std::vector<float> ones(kTileColumns, 1.0F);
  const auto aligned = [](int64_t bytes) {
    return std::unique_ptr<void, void (*)(void*)>(
        std::aligned_alloc(64, static_cast<size_t>(bytes)), std::free);
  };
  const auto packed = aligned(64 * 64 * 8);
  const auto dots = aligned(64 * kTileColumns * 4);
  const auto scratch = aligned(kDotScratchBytes);
  const auto expect = [&](uint32_t bits, int64_t at) {
    const auto ours = static_cast<double>(static_cast<const float*>(dots.get())[at]);
    const double value = HalfValue(bits);
    return std::isnan(value) ? std::isnan(ours) : ours == value;
  };
  TileDotsParams params = {.hidden = packed.get(),
                           .num_rows = 0,
                           .hidden_size = 1,
                           .k_begin = 0,
                           .k_end = 1,
                           .weight_tile = ones.data(),
                           .weight_dtype = Dtype::kF32,
                           .dots = static_cast<float*>(dots.get()),
                           .scratch = scratch.get()};
  std::vector<uint16_t> halves(0x10000);
  std::iota(halves.begin(), halves.end(), uint16_t{0});

  for (uint32_t first = 0; first < 0x10000; first += 64) {
    of_hidden.pack_rows(Dtype::kF16, &halves[first], 64, 1, packed.get());
    params.num_rows = 64;
    of_hidden.tile_dots(params);
    for (uint32_t i = 0; i < 64; ++i) {
      ASSERT_TRUE(expect(first + i, i * kTileColumns)) << first + i;
    }
  }
  of_weight.pack_rows(Dtype::kF32, ones.data(), 64, 1, packed.get());
  params.weight_dtype = Dtype::kF16;
  for (const int64_t num_rows : {1, 64}) {  // converted when it is read, or once for all rows
    params.num_rows = num_rows;
    for (uint32_t first = 0; first + kTileColumns <= 0x10000; first += 128) {
      params.weight_tile = &halves[first];
      of_weight.tile_dots(params);
      for (uint32_t i = 0; i < kTileColumns; ++i) ASSERT_TRUE(expect(first + i, i)) << first + i;
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
      EXPECT_EQ(c.extremes[i].max_logit, *std::max_element(logits, logits + kTileColumns));
      EXPECT_EQ(c.extremes[i].min_logit, *std::min_element(logits, logits + kTileColumns));
    }
  }
}

TEST_P(TileKernelsTest, WritesOnlyWhatIsWanted) {
  StatsCase c(20);
  StatsCase all(20);
  std::fill(c.extremes.begin(), c.extremes.end(), TileExtremes{-7, -7, -7});
  std::fill(c.entropy_sums.begin(), c.entropy_sums.end(), TileSums{-7, -7, -7, -7});
  CpuTileStatsParams params = c.Params();
  params.wants_sum_squares = params.wants_extremes = false;
  params.entropy_sums = c.entropy_sums.data();

  TileStatsFor(GetParam())(params);
  TileStatsFor(GetParam())(all.Params());

  for (size_t row = 0; row < 20; ++row) {
    EXPECT_EQ(c.sums[row].sum_squares, 0);
    EXPECT_EQ(c.sums[row].sum, all.sums[row].sum);
    EXPECT_EQ(c.sums[row].weighted, all.sums[row].weighted);
    EXPECT_EQ(c.extremes[row].max_logit, all.extremes[row].max_logit);
    EXPECT_EQ(c.extremes[row].min_logit, -7);
    EXPECT_EQ(c.extremes[row].argmax, -7);
    EXPECT_EQ(c.entropy_sums[row].exponent, -7);
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
    EXPECT_EQ(c.entropy_sums[row].exponent, alone.sums[row].exponent);
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

TEST_P(TileKernelsTest, EachTransformMayBeTheOnlyOne) {
  const std::vector<float> bias(kTileColumns, 2.5F);
  for (const auto& [transform, has_bias] : std::vector<std::pair<LogitTransform, bool>>{
           {{}, false}, {{.scale = 0.5F}, false}, {{.softcap = 4.0F}, false}, {{}, true}}) {
    StatsCase c(2);
    const std::vector<float> dots = c.logits;
    CpuTileStatsParams params = c.Params();
    params.transform = transform;
    params.bias = has_bias ? bias.data() : nullptr;

    TileStatsFor(GetParam())(params);

    for (size_t i = 0; i < dots.size(); ++i) {
      double z = static_cast<double>(transform.scale * dots[i]) + (has_bias ? 2.5 : 0.0);
      if (transform.softcap > 0) z = 4 * std::tanh(z / 4);
      ASSERT_NEAR(c.logits[i], z, 1e-6);
    }
  }
}

TEST_P(TileKernelsTest, ACapBoundsInfinitiesAndKeepsNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  StatsCase c(3);
  c.logits[1] = kInfinity;
  c.logits[2] = -kInfinity;
  c.logits[kTileColumns + 100] = std::numeric_limits<float>::quiet_NaN();
  CpuTileStatsParams params = c.Params();
  params.transform = {.softcap = 30.0F};

  TileStatsFor(GetParam())(params);

  EXPECT_EQ(c.logits[1], 30.0F);
  EXPECT_EQ(c.logits[2], -30.0F);
  EXPECT_EQ(c.extremes[0].argmax, 1);
  EXPECT_TRUE(std::isfinite(c.sums[0].sum));
  EXPECT_EQ(c.sums[1].exponent, kNonfiniteExponent);
  EXPECT_TRUE(std::isfinite(c.sums[2].sum));
}

}  // namespace
}  // namespace logprobd::kernels
