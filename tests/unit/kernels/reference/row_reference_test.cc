#include "kernels/reference/row_reference.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

using ::testing::ElementsAre;

// Logits ln 1, ln 2, ln 5: p = 1/8, 2/8, 5/8.
const std::vector<double> kLogits = {0.0, std::log(2.0), std::log(5.0)};
const double kEntropy = std::log(8.0) - (2 * std::log(2.0) + 5 * std::log(5.0)) / 8;

TEST(RowReferenceTest, MatchesValuesComputedByHand) {
  const RowReference row =
      ScoreRowReference(kLogits, {.target = 1, .top_k = 2, .candidate_ids = {0, 2}});

  EXPECT_NEAR(row.logprob, std::log(0.25), 1e-15);
  EXPECT_NEAR(row.lse, std::log(8.0), 1e-15);
  EXPECT_NEAR(row.entropy, kEntropy, 1e-15);
  EXPECT_NEAR(row.sum_p_squared, 30.0 / 64, 1e-15);
  EXPECT_EQ(row.argmax_id, 2);
  EXPECT_NEAR(row.argmax_logprob, std::log(0.625), 1e-15);
  EXPECT_EQ(row.max_logit, kLogits[2]);
  EXPECT_EQ(row.min_logit, 0.0);
  EXPECT_EQ(row.target_rank, 1);
  EXPECT_THAT(row.top_k_ids, ElementsAre(2, 1));
  EXPECT_NEAR(row.candidate_logprobs[0], std::log(0.125), 1e-15);
  EXPECT_NEAR(row.candidate_logprobs[1], std::log(0.625), 1e-15);
}

TEST(RowReferenceTest, TemperatureDividesTheLogits) {
  // At temperature 1/2 the weights are 1, 4, 25.
  const RowReference row =
      ScoreRowReference(kLogits, {.target = 1, .temperature = 0.5, .candidate_ids = {}});

  EXPECT_NEAR(row.logprob, std::log(4.0 / 30), 1e-14);
  EXPECT_EQ(row.max_logit, kLogits[2]);  // before temperature
}

TEST(RowReferenceTest, TheEntropyCanHaveItsOwnTemperature) {
  const RowReference row = ScoreRowReference(
      kLogits, {.temperature = 0.5, .entropy_temperature = 1, .candidate_ids = {}});

  EXPECT_NEAR(row.entropy, kEntropy, 1e-15);
}

TEST(RowReferenceTest, LargeLogitsDoNotOverflow) {
  const RowReference row =
      ScoreRowReference(std::vector<double>{5000, 5000 + std::log(3.0)}, {.candidate_ids = {}});

  EXPECT_NEAR(row.logprob, std::log(0.25), 1e-12);
}

TEST(RowReferenceTest, TheLowestIdWinsTies) {
  const RowReference row =
      ScoreRowReference(std::vector<double>{1, 2, 2, 2}, {.top_k = 3, .candidate_ids = {}});

  EXPECT_EQ(row.argmax_id, 1);
  EXPECT_THAT(row.top_k_ids, ElementsAre(1, 2, 3));
  EXPECT_EQ(row.target_rank, 3);
  for (const int32_t id : {1, 2, 3}) {
    EXPECT_EQ(
        ScoreRowReference(std::vector<double>{1, 2, 2, 2}, {.target = id, .candidate_ids = {}})
            .target_rank,
        id - 1);
  }
}

TEST(RowReferenceTest, NegativeInfinityHasNoProbability) {
  const double infinity = std::numeric_limits<double>::infinity();
  const RowReference row =
      ScoreRowReference(std::vector<double>{-infinity, 0, 0}, {.candidate_ids = {}});

  EXPECT_EQ(row.logprob, -infinity);
  EXPECT_NEAR(row.entropy, std::log(2.0), 1e-15);
}

TEST(RowReferenceTest, NanAndInfinityMakeTheRowNonfinite) {
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const RowReference row =
        ScoreRowReference(std::vector<double>{0, bad, 1}, {.top_k = 2, .candidate_ids = {0}});

    EXPECT_TRUE(std::isnan(row.logprob));
    EXPECT_TRUE(std::isnan(row.entropy));
    EXPECT_EQ(row.argmax_id, -1);
    EXPECT_EQ(row.target_rank, -1);
    EXPECT_THAT(row.top_k_ids, ElementsAre(-1, -1));
    EXPECT_TRUE(std::isnan(row.candidate_logprobs[0]));
  }
}

TEST(RowReferenceTest, ReadsEveryDtypeExactly) {
  const std::vector<uint16_t> bf16 = {0x3FC0, 0xC000, 0x0001};  // 1.5, -2, 2^-133
  const std::vector<uint16_t> f16 = {0x3E00, 0xC000, 0x0001, 0x7C00};
  const std::vector<float> f32 = {1.5F, -2.0F};

  EXPECT_EQ(ElementReference(bf16.data(), 0, Dtype::kBf16), 1.5);
  EXPECT_EQ(ElementReference(bf16.data(), 1, Dtype::kBf16), -2.0);
  EXPECT_EQ(ElementReference(bf16.data(), 2, Dtype::kBf16), 0x1p-133);
  EXPECT_EQ(ElementReference(f16.data(), 0, Dtype::kF16), 1.5);
  EXPECT_EQ(ElementReference(f16.data(), 1, Dtype::kF16), -2.0);
  EXPECT_EQ(ElementReference(f16.data(), 2, Dtype::kF16), 0x1p-24);
  EXPECT_EQ(ElementReference(f16.data(), 3, Dtype::kF16), std::numeric_limits<double>::infinity());
  EXPECT_EQ(ElementReference(f32.data(), 1, Dtype::kF32), -2.0);
}

TEST(RowReferenceTest, AppliesScaleThenBiasThenCap) {
  const std::vector<float> hidden = {1, 2};
  const std::vector<float> weight = {3, 4, -1, 5};  // dots 11 and 9
  const std::vector<float> bias = {1, -2};

  const std::vector<double> logits =
      LogitsReference(hidden.data(), Dtype::kF32, weight.data(), Dtype::kF32, 2, 2,
                      {.scale = 0.5F, .softcap = 4.0F}, bias);

  EXPECT_NEAR(logits[0], 4 * std::tanh((0.5 * 11 + 1) / 4), 1e-14);
  EXPECT_NEAR(logits[1], 4 * std::tanh((0.5 * 9 - 2) / 4), 1e-14);
}

}  // namespace
}  // namespace logprobd::kernels
