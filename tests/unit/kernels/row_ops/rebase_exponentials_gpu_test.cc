#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/row_ops/rebase_exponentials.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/row_ops/cached_case.h"

namespace logprobd::kernels {
namespace {

using namespace cached_case;  // NOLINT: the words of these tests

class RebaseExponentialsTest : public testing::GpuTest {};

/// Rows with a gradient for their logprob alone.
KeptCase LogprobCase(int64_t num_rows, int64_t vocab_size, double stddev) {
  KeptCase c = MakeKeptCase(num_rows, vocab_size, stddev);
  for (size_t i = 0; i < c.rows.size(); ++i) {
    c.rows[i].upstream = {.logprob = i % 2 == 0 ? -1.25 : 3e-4};
  }
  return c;
}

/// As the forward pass keeps them with a level: those of tiles up to `level` of each row relative
/// to it.
Kept KeptRelativeTo(const KeptCase& c, const std::vector<int32_t>& levels) {
  Kept kept = CacheExponentials(c);
  for (size_t i = 0; i < kept.exponents.size(); ++i) {
    const int32_t level = levels[i / static_cast<size_t>(c.row_tiles())];
    int32_t& exponent = kept.exponents[i];
    if (exponent == kEmptyExponent || exponent > level) continue;
    for (size_t j = i * kTileColumns; j < (i + 1) * kTileColumns; ++j) {
      const float power = testing::FromBits(kept.exponentials[j], Dtype::kBf16);
      kept.exponentials[j] = testing::ToBf16(std::ldexp(power, exponent - level));
    }
    exponent = level;
  }
  return kept;
}

/// The largest exponent of each row, and `above`.
std::vector<int32_t> LevelsOf(const KeptCase& c, int32_t above) {
  const Kept kept = CacheExponentials(c);
  std::vector<int32_t> levels;
  for (size_t i = 0; i < c.rows.size(); ++i) {
    const auto first = kept.exponents.begin() + static_cast<int64_t>(i) * c.row_tiles();
    levels.push_back(*std::max_element(first, first + c.row_tiles()) + above);
  }
  return levels;
}

struct Leveled {
  std::vector<uint16_t> exponentials;  ///< [rows + 1, row_tiles, 192]; the last row is poison.
  std::vector<float> factors;          ///< [rows + 1], likewise.
};

Leveled Level(const KeptCase& c, Kept kept, const std::vector<RowGradient>& rows) {
  const size_t row_columns = static_cast<size_t>(c.row_tiles()) * kTileColumns;
  kept.exponentials.resize(kept.exponentials.size() + row_columns, kPoison);
  const DeviceArray<uint16_t> exponentials(kept.exponentials);
  const DeviceArray<int32_t> exponents(kept.exponents);
  const DeviceArray<RowGradient> row_array(rows);
  const DeviceArray<float> factors(std::vector<float>(rows.size() + 1, 77.0F));
  EXPECT_EQ(LaunchRebaseExponentials(
                {.num_rows = static_cast<int64_t>(rows.size()),
                 .exponentials = reinterpret_cast<__nv_bfloat16*>(exponentials.data()),
                 .exponents = exponents.data(),
                 .row_tiles = c.row_tiles(),
                 .num_tiles = c.row_tiles(),
                 .rows = row_array.data(),
                 .factors = factors.data()},
                nullptr),
            cudaSuccess);
  Leveled leveled = {exponentials.Read(), factors.Read()};
  for (size_t j = rows.size() * row_columns; j < leveled.exponentials.size(); ++j) {
    EXPECT_EQ(leveled.exponentials[j], kPoison);
  }
  EXPECT_EQ(leveled.factors.back(), 77.0F);
  return leveled;
}

/// Powers times factors are the gradients.
void ExpectGradients(const KeptCase& c, const Leveled& leveled) {
  constexpr double kPowerError = 0x1p-8;  // as in ExpectNearTruth
  const auto stride = static_cast<size_t>(c.row_tiles()) * kTileColumns;
  for (size_t i = 0; i < c.rows.size(); ++i) {
    const KeptRow& row = c.rows[i];
    const RowSoftmax truth = SoftmaxOf(row);
    const double gradient_scale = kScale / static_cast<double>(row.temperature);
    for (size_t j = 0; j < stride; ++j) {
      const double power = testing::FromBits(leveled.exponentials[i * stride + j], Dtype::kBf16);
      if (j >= static_cast<size_t>(c.vocab_size)) {
        ASSERT_EQ(power, 0) << "row " << i << ", column " << j;
        continue;
      }
      const testing::ColumnPart part = {.is_target = static_cast<int64_t>(j) == row.target};
      const double log_error = part.is_target ? 0.0 : kPowerError;
      const double wanted =
          gradient_scale * testing::TextbookGradient(truth, j, row.upstream, part);
      const double off =
          gradient_scale * testing::GradientError(truth, j, row.upstream, part, log_error);
      // What is rounded to bf16 is the power; its place in its binade is not the gradient's.
      const double factor = std::fabs(static_cast<double>(leveled.factors[i]));
      const double rounding =
          factor * testing::HalfUlp((std::fabs(wanted) + off) / factor, Dtype::kBf16);
      ASSERT_NEAR(power * leveled.factors[i], wanted, off + rounding)
          << "row " << i << ", column " << j << ", p " << truth.p[j];
    }
  }
}

void ExpectGradientsOf(const KeptCase& c) {
  const std::vector<RowGradient> rows = ConstantsOf(c);
  ExpectGradients(c, Level(c, CacheExponentials(c), rows));
  // Of one level; of tiles near it and others above it.
  ExpectGradients(c, Level(c, KeptRelativeTo(c, LevelsOf(c, 2)), rows));
  ExpectGradients(c, Level(c, KeptRelativeTo(c, LevelsOf(c, -1)), rows));
}

TEST_F(RebaseExponentialsTest, TimesTheirFactorAreTheGradientsAtVocabularyEdges) {
  for (const int64_t vocab : {1, 191, 192, 193, 1'000, 6'200}) {
    ExpectGradientsOf(LogprobCase(5, vocab, 3));
  }
}

TEST_F(RebaseExponentialsTest, TimesTheirFactorAreTheGradientsOfMoreTilesThanABlockHasThreads) {
  ExpectGradientsOf(LogprobCase(2, 50'000, 3));
}

TEST_F(RebaseExponentialsTest, TimesTheirFactorAreTheGradientsOfFlatAndPeakedRows) {
  for (const double stddev : {0.0, 1.0, 20.0, 100.0}) {
    ExpectGradientsOf(LogprobCase(9, 1'000, stddev));
  }
}

TEST_F(RebaseExponentialsTest, TimesTheirFactorAreTheGradientsWhereTheLseIsLarge) {
  for (const float offset : {7e4F, -7e4F}) {
    KeptCase c = LogprobCase(4, 500, 3);
    for (KeptRow& row : c.rows) {
      for (float& logit : row.logits) logit += offset;
    }
    ExpectGradientsOf(c);
  }
}

TEST_F(RebaseExponentialsTest, ATargetThatIsNearlyCertainKeepsItsSmallGradient) {
  KeptCase c = LogprobCase(1, 1'000, 0);
  c.rows[0].temperature = 1;
  c.rows[0].target = 333;
  c.rows[0].logits[333] = std::log(999e4F) + 0.01F;  // not a power of two

  const Leveled leveled = Level(c, CacheExponentials(c), ConstantsOf(c));

  const double wanted = -1.25 * kScale * (1 - SoftmaxOf(c.rows[0]).p[333]);
  EXPECT_NEAR(testing::FromBits(leveled.exponentials[333], Dtype::kBf16) * leveled.factors[0],
              wanted, -0.01 * wanted);
}

// A tile without a logit has no exponent, which must not pass for one that is large.
TEST_F(RebaseExponentialsTest, MaskedTilesStayZeroBesideLogitsFarBelowZero) {
  KeptCase c = LogprobCase(3, 600, 1);
  for (KeptRow& row : c.rows) {
    for (float& logit : row.logits) logit -= 1e5F;
    std::fill(row.logits.begin() + 192, row.logits.begin() + 384,
              -std::numeric_limits<float>::infinity());
    row.target = 5;
  }
  ExpectGradientsOf(c);
}

/// The constants of a shard's rows of which other shards have 2^`gap` times as much.
std::vector<RowGradient> Below(std::vector<RowGradient> rows, float gap) {
  for (RowGradient& row : rows) {
    row.log2_sum += gap;
    row.target_exponent -= gap;
  }
  return rows;
}

// The factor was 0 there, and the target's element, divided by it, infinite.
TEST_F(RebaseExponentialsTest, AShardFarBelowTheOthersKeepsItsTargetAndSmallGradients) {
  const KeptCase c = LogprobCase(6, 1'000, 3);
  const std::vector<RowGradient> rows = ConstantsOf(c);
  const size_t row_columns = static_cast<size_t>(c.row_tiles()) * kTileColumns;
  for (const float gap : {30.0F, 59.0F, 70.0F, 90.0F, 130.0F, 400.0F}) {
    const Leveled leveled = Level(c, CacheExponentials(c), Below(rows, gap));

    for (size_t i = 0; i < c.rows.size(); ++i) {
      const KeptRow& row = c.rows[i];
      const RowSoftmax truth = SoftmaxOf(row);
      const double scale = kScale / static_cast<double>(row.temperature) * row.upstream.logprob;
      for (size_t j = 0; j < static_cast<size_t>(c.vocab_size); ++j) {
        const double p = std::ldexp(truth.p[j], -static_cast<int>(gap));
        const bool is_target = static_cast<int64_t>(j) == row.target;
        const double wanted = scale * ((is_target ? 1.0 : 0.0) - p);
        const double power =
            testing::FromBits(leveled.exponentials[i * row_columns + j], Dtype::kBf16);
        ASSERT_NEAR(power * leveled.factors[i], wanted, 0x1p-7 * std::fabs(wanted) + 0x1p-120)
            << "gap " << gap << ", row " << i << ", column " << j;
      }
      EXPECT_GE(std::fabs(leveled.factors[i]), 0x1p-90F);
    }
  }
}

TEST_F(RebaseExponentialsTest, AWeightThatVanishesBesideThePowersLeavesNoNan) {
  const KeptCase c = LogprobCase(3, 600, 3);
  std::vector<RowGradient> rows = ConstantsOf(c);
  for (RowGradient& row : rows) {
    row.free = -1e-41F;
    row.target = 1e-41F;
  }

  const Leveled leveled = Level(c, CacheExponentials(c), rows);

  for (size_t j = 0; j < size_t{3} * 4 * kTileColumns; ++j) {
    const double power = testing::FromBits(leveled.exponentials[j], Dtype::kBf16);
    ASSERT_NEAR(power * leveled.factors[j / (4 * kTileColumns)], 0, 2e-41) << j;
  }
}

TEST_F(RebaseExponentialsTest, ARowWithoutAGradientIsZeroWhateverWasKept) {
  KeptCase c = LogprobCase(3, 600, 3);
  std::vector<RowGradient> rows = ConstantsOf(c);
  rows[1].free = rows[1].target = 0;
  Kept kept = CacheExponentials(c);
  kept.exponentials[4 * kTileColumns + 7] = 0x7FC0;  // NaN, in a row that a graph cannot leave out

  const Leveled leveled = Level(c, kept, rows);

  for (size_t j = 4 * kTileColumns; j < 8 * kTileColumns; ++j)
    ASSERT_EQ(leveled.exponentials[j], 0);
  EXPECT_EQ(leveled.factors[1], 1.0F);
}

TEST_F(RebaseExponentialsTest, ATargetOfAnotherShardIsNowhere) {
  KeptCase c = LogprobCase(2, 600, 3);
  std::vector<RowGradient> rows = ConstantsOf(c);
  std::vector<RowGradient> elsewhere = rows;
  elsewhere[0].target_column = -1;
  elsewhere[1].target_column = 1'000;

  const Leveled here = Level(c, CacheExponentials(c), rows);
  const Leveled leveled = Level(c, CacheExponentials(c), elsewhere);

  EXPECT_EQ(leveled.factors, here.factors);
  for (size_t j = 0; j < 8 * kTileColumns; ++j) {
    const size_t row = j / (4 * kTileColumns);
    const bool is_target = static_cast<int64_t>(j % (4 * kTileColumns)) == c.rows[row].target;
    const float power = testing::FromBits(leveled.exponentials[j], Dtype::kBf16);
    EXPECT_TRUE(is_target ? power >= 0 : leveled.exponentials[j] == here.exponentials[j]) << j;
  }
}

// What is relative to another exponent is scaled by powers of two alone.
TEST_F(RebaseExponentialsTest, TheLevelLeavesTheBitsOfTheGradientsAlone) {
  const KeptCase c = LogprobCase(6, 1'000, 3);
  const std::vector<RowGradient> rows = ConstantsOf(c);
  const Leveled plain = Level(c, CacheExponentials(c), rows);

  const Leveled other = Level(c, KeptRelativeTo(c, LevelsOf(c, 30)), rows);

  const size_t row_columns = static_cast<size_t>(c.row_tiles()) * kTileColumns;
  for (size_t j = 0; j < 6 * row_columns; ++j) {
    const size_t row = j / row_columns;
    ASSERT_EQ(testing::FromBits(plain.exponentials[j], Dtype::kBf16) * plain.factors[row],
              testing::FromBits(other.exponentials[j], Dtype::kBf16) * other.factors[row])
        << j;
  }
}

TEST_F(RebaseExponentialsTest, RefusesBrokenBounds) {
  const KeptCase c = LogprobCase(2, 500, 3);
  const Kept kept = CacheExponentials(c);
  const DeviceArray<uint16_t> exponentials(kept.exponentials);
  const DeviceArray<int32_t> exponents(kept.exponents);
  const DeviceArray<RowGradient> rows(ConstantsOf(c));
  const DeviceArray<float> factors(std::vector<float>(2));
  const auto launch_with = [&](const auto& change) {
    RebaseExponentialsParams params = {
        .num_rows = 2,
        .exponentials = reinterpret_cast<__nv_bfloat16*>(exponentials.data()),
        .exponents = exponents.data(),
        .row_tiles = 3,
        .num_tiles = 3,
        .rows = rows.data(),
        .factors = factors.data()};
    change(params);
    return LaunchRebaseExponentials(params, nullptr);
  };
  using Params = RebaseExponentialsParams;
  EXPECT_EQ(launch_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(LaunchRebaseExponentials({}, nullptr), cudaSuccess);  // no rows
  EXPECT_EQ(launch_with([](Params& p) { p.num_rows = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.num_rows = int64_t{1} << 31; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.exponentials = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.exponentials += 1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.exponents = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.rows = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.factors = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.num_tiles = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.num_tiles = 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::kernels
