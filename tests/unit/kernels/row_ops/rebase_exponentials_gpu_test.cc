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

using namespace cached_case;  // NOLINT: helpers of these tests

class RebaseExponentialsTest : public testing::GpuTest {};

/// Makes rows whose loss depends on their logprobs only.
CachedCase LogprobCase(int64_t num_rows, int64_t vocab_size, double stddev) {
  CachedCase c = MakeCachedCase(num_rows, vocab_size, stddev);
  for (size_t i = 0; i < c.rows.size(); ++i) {
    c.rows[i].upstream = {.logprob = i % 2 == 0 ? -1.25 : 3e-4};
  }
  return c;
}

/// Returns the cache that the forward pass writes with reference exponents. Exponentials of a tile
/// are relative to the row's reference exponent unless the tile's exponent is above it.
Cache CacheRelativeTo(const CachedCase& c, const std::vector<int32_t>& references) {
  Cache cache = CacheExponentials(c);
  for (size_t i = 0; i < cache.exponents.size(); ++i) {
    const int32_t reference = references[i / static_cast<size_t>(c.row_tiles())];
    int32_t& exponent = cache.exponents[i];
    if (exponent == kEmptyExponent || exponent > reference) continue;
    for (size_t j = i * kTileColumns; j < (i + 1) * kTileColumns; ++j) {
      const float exponential = testing::FromBits(cache.exponentials[j], Dtype::kBf16);
      cache.exponentials[j] = testing::ToBf16(std::ldexp(exponential, exponent - reference));
    }
    exponent = reference;
  }
  return cache;
}

/// Returns reference exponents that are `above` higher than the largest exponent of each row.
std::vector<int32_t> ReferencesOf(const CachedCase& c, int32_t above) {
  const Cache cache = CacheExponentials(c);
  std::vector<int32_t> references;
  for (size_t i = 0; i < c.rows.size(); ++i) {
    const auto first = cache.exponents.begin() + static_cast<int64_t>(i) * c.row_tiles();
    references.push_back(*std::max_element(first, first + c.row_tiles()) + above);
  }
  return references;
}

struct Rebased {
  std::vector<uint16_t> exponentials;  ///< [rows + 1, row_tiles, 192]; the last row is poison.
  std::vector<float> factors;          ///< [rows + 1]; the last one is poison.
};

Rebased Rebase(const CachedCase& c, Cache cache, const std::vector<RowGradient>& rows) {
  const size_t row_columns = static_cast<size_t>(c.row_tiles()) * kTileColumns;
  cache.exponentials.resize(cache.exponentials.size() + row_columns, kPoison);
  const DeviceArray<uint16_t> exponentials(cache.exponentials);
  const DeviceArray<int32_t> exponents(cache.exponents);
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
  Rebased rebased = {exponentials.Read(), factors.Read()};
  for (size_t j = rows.size() * row_columns; j < rebased.exponentials.size(); ++j) {
    EXPECT_EQ(rebased.exponentials[j], kPoison);
  }
  EXPECT_EQ(rebased.factors.back(), 77.0F);
  return rebased;
}

/// Expects that the products of exponentials and factors are the gradients.
void ExpectGradients(const CachedCase& c, const Rebased& rebased) {
  constexpr double kExponentialError = 0x1p-8;  // as in ExpectNearTruth
  const auto stride = static_cast<size_t>(c.row_tiles()) * kTileColumns;
  for (size_t i = 0; i < c.rows.size(); ++i) {
    const CachedRow& row = c.rows[i];
    const RowSoftmax truth = SoftmaxOf(row);
    const double gradient_scale = kScale / static_cast<double>(row.temperature);
    for (size_t j = 0; j < stride; ++j) {
      const double exponential =
          testing::FromBits(rebased.exponentials[i * stride + j], Dtype::kBf16);
      if (j >= static_cast<size_t>(c.vocab_size)) {
        ASSERT_EQ(exponential, 0) << "row " << i << ", column " << j;
        continue;
      }
      const testing::ColumnPart part = {.is_target = static_cast<int64_t>(j) == row.target};
      const double log_error = part.is_target ? 0.0 : kExponentialError;
      const double expected =
          gradient_scale * testing::TextbookGradient(truth, j, row.upstream, part);
      const double off =
          gradient_scale * testing::GradientError(truth, j, row.upstream, part, log_error);
      // The factor makes the target's gradient exact. It differs by the rounding of the target's
      // element from the factor that belongs to the exponentials.
      const double factor_error = part.is_target ? 0x1p-22 : 0x1p-8;
      const double rounding = factor_error * (std::fabs(expected) + off);
      ASSERT_NEAR(exponential * rebased.factors[i], expected, off + rounding)
          << "row " << i << ", column " << j << ", p " << truth.p[j];
    }
  }
}

void ExpectGradientsOf(const CachedCase& c) {
  const std::vector<RowGradient> rows = ConstantsOf(c);
  ExpectGradients(c, Rebase(c, CacheExponentials(c), rows));
  // First all tiles are at or below the reference exponent, then some are above it.
  ExpectGradients(c, Rebase(c, CacheRelativeTo(c, ReferencesOf(c, 2)), rows));
  ExpectGradients(c, Rebase(c, CacheRelativeTo(c, ReferencesOf(c, -1)), rows));
}

TEST_F(RebaseExponentialsTest, GiveTheGradientsAtVocabularyEdges) {
  for (const int64_t vocab : {1, 191, 192, 193, 1'000, 6'200}) {
    ExpectGradientsOf(LogprobCase(5, vocab, 3));
  }
}

TEST_F(RebaseExponentialsTest, GiveTheGradientsOfMoreTilesThanABlockHasThreads) {
  ExpectGradientsOf(LogprobCase(2, 50'000, 3));
}

TEST_F(RebaseExponentialsTest, GiveTheGradientsOfFlatAndPeakedRows) {
  for (const double stddev : {0.0, 1.0, 20.0, 100.0}) {
    ExpectGradientsOf(LogprobCase(9, 1'000, stddev));
  }
}

TEST_F(RebaseExponentialsTest, GiveTheGradientsForALargeLse) {
  for (const float offset : {7e4F, -7e4F}) {
    CachedCase c = LogprobCase(4, 500, 3);
    for (CachedRow& row : c.rows) {
      for (float& logit : row.logits) logit += offset;
    }
    ExpectGradientsOf(c);
  }
}

TEST_F(RebaseExponentialsTest, ANearlyCertainTargetKeepsItsSmallGradient) {
  CachedCase c = LogprobCase(1, 1'000, 0);
  c.rows[0].temperature = 1;
  c.rows[0].target = 333;
  c.rows[0].logits[333] = std::log(999e4F) + 0.01F;  // not a power of two

  const Rebased rebased = Rebase(c, CacheExponentials(c), ConstantsOf(c));

  const double expected = -1.25 * kScale * (1 - SoftmaxOf(c.rows[0]).p[333]);
  EXPECT_NEAR(testing::FromBits(rebased.exponentials[333], Dtype::kBf16) * rebased.factors[0],
              expected, -0.01 * expected);
}

// A tile with only -inf has kEmptyExponent, which must not be treated as a large exponent.
TEST_F(RebaseExponentialsTest, MaskedTilesStayZeroWhenOtherLogitsAreFarBelowZero) {
  CachedCase c = LogprobCase(3, 600, 1);
  for (CachedRow& row : c.rows) {
    for (float& logit : row.logits) logit -= 1e5F;
    std::fill(row.logits.begin() + 192, row.logits.begin() + 384,
              -std::numeric_limits<float>::infinity());
    row.target = 5;
  }
  ExpectGradientsOf(c);
}

/// Returns constants as if the sum over all shards were 2^`gap` times the sum of this shard.
std::vector<RowGradient> Below(std::vector<RowGradient> rows, float gap) {
  for (RowGradient& row : rows) {
    row.log2_sum += gap;
    row.target_exponent -= gap;
  }
  return rows;
}

// Regression: the factor was 0, and the target's element, which is divided by it, was infinite.
TEST_F(RebaseExponentialsTest, AShardFarBelowTheOthersKeepsItsTargetAndSmallGradients) {
  const CachedCase c = LogprobCase(6, 1'000, 3);
  const std::vector<RowGradient> rows = ConstantsOf(c);
  const size_t row_columns = static_cast<size_t>(c.row_tiles()) * kTileColumns;
  for (const float gap : {30.0F, 59.0F, 70.0F, 90.0F, 130.0F, 400.0F}) {
    const Rebased rebased = Rebase(c, CacheExponentials(c), Below(rows, gap));

    for (size_t i = 0; i < c.rows.size(); ++i) {
      const CachedRow& row = c.rows[i];
      const RowSoftmax truth = SoftmaxOf(row);
      const double scale = kScale / static_cast<double>(row.temperature) * row.upstream.logprob;
      for (size_t j = 0; j < static_cast<size_t>(c.vocab_size); ++j) {
        const double p = std::ldexp(truth.p[j], -static_cast<int>(gap));
        const bool is_target = static_cast<int64_t>(j) == row.target;
        const double expected = scale * ((is_target ? 1.0 : 0.0) - p);
        const double exponential =
            testing::FromBits(rebased.exponentials[i * row_columns + j], Dtype::kBf16);
        ASSERT_NEAR(exponential * rebased.factors[i], expected,
                    0x1p-7 * std::fabs(expected) + 0x1p-120)
            << "gap " << gap << ", row " << i << ", column " << j;
      }
      EXPECT_GE(std::fabs(rebased.factors[i]), 0x1p-90F);
    }
  }
}

TEST_F(RebaseExponentialsTest, AVanishingWeightGivesNoNan) {
  const CachedCase c = LogprobCase(3, 600, 3);
  std::vector<RowGradient> rows = ConstantsOf(c);
  for (RowGradient& row : rows) {
    row.free = -1e-41F;
    row.target = 1e-41F;
  }

  const Rebased rebased = Rebase(c, CacheExponentials(c), rows);

  for (size_t j = 0; j < size_t{3} * 4 * kTileColumns; ++j) {
    const double exponential = testing::FromBits(rebased.exponentials[j], Dtype::kBf16);
    ASSERT_NEAR(exponential * rebased.factors[j / (4 * kTileColumns)], 0, 2e-41) << j;
  }
}

TEST_F(RebaseExponentialsTest, ARowWithoutAGradientIsZeroForAnyCache) {
  CachedCase c = LogprobCase(3, 600, 3);
  std::vector<RowGradient> rows = ConstantsOf(c);
  rows[1].free = rows[1].target = 0;
  Cache cache = CacheExponentials(c);
  // A CUDA graph cannot skip a row without a gradient, and the cache of such a row may hold NaN.
  cache.exponentials[4 * kTileColumns + 7] = 0x7FC0;

  const Rebased rebased = Rebase(c, cache, rows);

  for (size_t j = 4 * kTileColumns; j < 8 * kTileColumns; ++j)
    ASSERT_EQ(rebased.exponentials[j], 0);
  EXPECT_EQ(rebased.factors[1], 1.0F);
}

TEST_F(RebaseExponentialsTest, ATargetOfAnotherShardChangesNoColumn) {
  CachedCase c = LogprobCase(2, 600, 3);
  std::vector<RowGradient> rows = ConstantsOf(c);
  std::vector<RowGradient> elsewhere = rows;
  elsewhere[0].target_column = -1;
  elsewhere[1].target_column = 1'000;

  const Rebased here = Rebase(c, CacheExponentials(c), rows);
  const Rebased rebased = Rebase(c, CacheExponentials(c), elsewhere);

  for (size_t row = 0; row < 2; ++row) {
    EXPECT_NEAR(rebased.factors[row] / here.factors[row], 1, 0x1p-8) << row;
  }
  for (size_t j = 0; j < 8 * kTileColumns; ++j) {
    const size_t row = j / (4 * kTileColumns);
    const bool is_target = static_cast<int64_t>(j % (4 * kTileColumns)) == c.rows[row].target;
    const float exponential = testing::FromBits(rebased.exponentials[j], Dtype::kBf16);
    EXPECT_TRUE(is_target ? exponential >= 0 : rebased.exponentials[j] == here.exponentials[j])
        << j;
  }
}

// Rebasing to another exponent only multiplies by powers of two.
TEST_F(RebaseExponentialsTest, TheReferenceExponentDoesNotChangeTheBitsOfTheGradients) {
  const CachedCase c = LogprobCase(6, 1'000, 3);
  const std::vector<RowGradient> rows = ConstantsOf(c);
  const Rebased plain = Rebase(c, CacheExponentials(c), rows);

  const Rebased other = Rebase(c, CacheRelativeTo(c, ReferencesOf(c, 30)), rows);

  const size_t row_columns = static_cast<size_t>(c.row_tiles()) * kTileColumns;
  for (size_t j = 0; j < 6 * row_columns; ++j) {
    const size_t row = j / row_columns;
    ASSERT_EQ(testing::FromBits(plain.exponentials[j], Dtype::kBf16) * plain.factors[row],
              testing::FromBits(other.exponentials[j], Dtype::kBf16) * other.factors[row])
        << j;
  }
}

TEST_F(RebaseExponentialsTest, RefusesBrokenBounds) {
  const CachedCase c = LogprobCase(2, 500, 3);
  const Cache cache = CacheExponentials(c);
  const DeviceArray<uint16_t> exponentials(cache.exponentials);
  const DeviceArray<int32_t> exponents(cache.exponents);
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
