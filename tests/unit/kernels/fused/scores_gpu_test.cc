#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "gtest/gtest.h"
#include "kernels/fused/params.h"
#include "tests/unit/kernels/fused/fused_case.h"

namespace logprobd::testing {
namespace {

using kernels::Dtype;

class FusedScoresTest : public FusedTest {};

TEST_F(FusedScoresTest, MatchTheTruthAtVocabularyEdges) {
  for (const int64_t vocab : {1, 2, 7, 64, 128, 191, 192, 193, 256, 320, 383, 384, 385, 769}) {
    for (const double stddev : {1.0, 3.0, 20.0}) {
      const FusedCase c =
          MakeFusedCase({.rows = 9, .hidden = 96, .vocab = vocab, .logit_stddev = stddev});
      ExpectNearTruth(c, RunFused(c));
    }
  }
}

TEST_F(FusedScoresTest, MatchTheTruthForAnyNumberOfRows) {
  for (const int64_t rows : {1, 7, 15, 26, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 1'025}) {
    const FusedCase c = MakeFusedCase({.rows = rows, .hidden = 128, .vocab = 500});
    ExpectNearTruth(c, RunFused(c));
  }
}

TEST_F(FusedScoresTest, MatchTheTruthForAnyHiddenSize) {
  for (const int64_t hidden : {1, 8, 31, 70, 123, 896, 2'880, 4'095}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      const FusedCase c =
          MakeFusedCase({.rows = 70, .hidden = hidden, .vocab = 400, .dtype = dtype});
      ExpectNearTruth(c, RunFused(c));
    }
  }
}

TEST_F(FusedScoresTest, NoRowsDoNothing) {
  FusedCase c = MakeFusedCase({.rows = 1});
  c = SelectRows(c, {});
  FusedRun run(c);
  run.Enqueue();
  EXPECT_EQ(cudaStreamSynchronize(run.stream()), cudaSuccess);
}

TEST_F(FusedScoresTest, TransformsAreScaleThenBiasThenCap) {
  for (const float softcap : {0.0F, 5.0F, 30.0F}) {
    for (const float scale : {1.0F, 0.0625F}) {
      FusedCase c = MakeFusedCase({.rows = 140, .hidden = 320, .vocab = 500, .logit_stddev = 10});
      c.transform = {.scale = scale, .softcap = softcap};
      for (int64_t i = 0; i < c.vocab_size; ++i) {
        c.bias.push_back(static_cast<float>(std::sin(static_cast<double>(i))));
      }
      ExpectNearTruth(c, RunFused(c));
    }
  }
}

TEST_F(FusedScoresTest, EachRowHasItsOwnTemperature) {
  FusedCase c = MakeFusedCase({.rows = 9, .hidden = 128, .vocab = 700});
  c.temperatures = {1e-3F, 1e-2F, 0.1F, 0.7F, 1.0F, 1.5F, 10.0F, 100.0F, 1e3F};
  // A temperature of 1e-3 multiplies the error of a logit by a thousand.
  ExpectNearTruth(c, RunFused(c), {.logprob = 2e-2, .entropy = 2e-3});
}

TEST_F(FusedScoresTest, TheEntropyMayHaveItsOwnTemperature) {
  FusedCase c = MakeFusedCase({.rows = 70, .hidden = 128, .vocab = 700});
  const FusedScores plain = RunFused(c);
  c.entropy_temperatures.assign(70, 2.0F);
  const FusedScores other = RunFused(c);
  ExpectNearTruth(c, other);
  EXPECT_EQ(other.logprob, plain.logprob);
  EXPECT_EQ(other.sum_p_squared, plain.sum_p_squared);
}

TEST_F(FusedScoresTest, Fp32RowsAreNotRounded) {
  for (const int64_t hidden : {33, 128, 896, 2'048}) {
    FusedCase c = MakeFusedCase({.rows = 70, .hidden = hidden, .vocab = 600, .is_f32 = true});
    for (const int32_t num_splits : {2, 3}) {
      c.num_splits = num_splits;
      // The truth is computed from the fp32 values; rounding them to bf16 adds an error of 1e-2.
      ExpectNearTruth(c, RunFused(c), {.logprob = 6e-5, .entropy = 6e-5});
    }
  }
}

TEST_F(FusedScoresTest, OneDominantLogitGivesZeroLogprobAndEntropy) {
  for (const float top : {40.0F, 7e4F}) {
    FusedCase c = MakeFusedCase({.rows = 3, .hidden = 64, .vocab = 1'000});
    c.bias.assign(1'000, 0.0F);
    c.bias[777] = top;
    c.targets = {777, 776, 0};
    const FusedScores scores = RunFused(c);
    EXPECT_NEAR(scores.logprob[0], 0.0F, 1e-6F);
    EXPECT_LE(scores.logprob[0], 0.0F);
    EXPECT_NEAR(scores.entropy[0], 0.0F, 1e-6F);
    EXPECT_EQ(scores.argmax_id[1], 777);
    EXPECT_NEAR(scores.logprob[1], TruthOf(c, 1).logprob, 1e-6 * top + 1e-5);
  }
}

TEST_F(FusedScoresTest, VeryLowAndVeryHighLogitsLoseNoAccuracy) {
  for (const float shift : {-90.0F, -200.0F, -1e4F, -7e4F, 7e4F}) {
    FusedCase c = MakeFusedCase({.rows = 5, .hidden = 64, .vocab = 500});
    c.bias.assign(500, shift);
    // Adding the shift rounds each logit in its last place.
    const double error = 2 * std::abs(static_cast<double>(shift)) * 6e-8 + 1e-4;
    ExpectNearTruth(c, RunFused(c), {.logprob = error, .entropy = 2 * error});
  }
}

TEST_F(FusedScoresTest, EqualLogitsHaveTheLargestEntropyAndTheLowestArgmax) {
  for (const int64_t vocab : {1, 100, 192, 1'000, 5'000}) {
    FusedCase c = MakeFusedCase({.rows = 2, .hidden = 64, .vocab = vocab});
    std::fill(c.weight.begin(), c.weight.end(), 0.0F);
    const FusedScores scores = RunFused(c);
    EXPECT_NEAR(scores.entropy[0], std::log(static_cast<double>(vocab)), 2e-6);
    EXPECT_LE(scores.entropy[0], static_cast<float>(std::log(static_cast<double>(vocab))));
    EXPECT_NEAR(scores.logprob[1], -std::log(static_cast<double>(vocab)), 2e-6);
    EXPECT_EQ(scores.argmax_id[0], 0);
  }
}

TEST_F(FusedScoresTest, ATargetThatNoTileHoldsIsNotWritten) {
  FusedCase c = MakeFusedCase({.rows = 4, .hidden = 64, .vocab = 300});
  const FusedScores inside = RunFused(c);
  c.targets = {-100, 300, std::numeric_limits<int32_t>::max(), c.targets[3]};
  const FusedScores outside = RunFused(c);
  EXPECT_EQ(outside.entropy, inside.entropy);
  EXPECT_EQ(outside.logprob[3], inside.logprob[3]);
  for (size_t row = 0; row < 3; ++row) {  // the poison is unchanged
    EXPECT_NEAR(outside.logprob[row], -12'345.5F - outside.lse[row], 1e-2F);
  }
}

TEST_F(FusedScoresTest, MaskedTokensAreIgnored) {
  FusedCase c = MakeFusedCase({.rows = 70, .hidden = 64, .vocab = 600});
  c.bias.assign(600, 0.0F);
  for (size_t i = 0; i < 600; i += 2) c.bias[i] = -std::numeric_limits<float>::infinity();
  for (int32_t& target : c.targets) target |= 1;
  for (int32_t& target : c.targets) target = std::min(target, 599);
  const FusedScores scores = RunFused(c);
  for (const int64_t row : {0, 1, 69}) {
    const RowTruth truth = TruthOf(c, row);
    EXPECT_NEAR(scores.logprob[static_cast<size_t>(row)], truth.logprob, 1e-4);
    EXPECT_NEAR(scores.entropy[static_cast<size_t>(row)], truth.entropy, 2e-4);
    EXPECT_EQ(scores.nonfinite[static_cast<size_t>(row)], 0);
  }
}

TEST_F(FusedScoresTest, NanAndInfinityAffectOnlyTheirRow) {
  const FusedCase clean = MakeFusedCase({.rows = 70, .hidden = 64, .vocab = 600});
  const FusedScores expected = RunFused(clean);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    FusedCase c = clean;
    c.hidden[static_cast<size_t>(33 * c.hidden_size + 5)] = bad;
    const FusedScores scores = RunFused(c);
    for (size_t row = 0; row < 70; ++row) {
      if (row == 33) {
        EXPECT_EQ(scores.nonfinite[row], 1);
        EXPECT_TRUE(std::isnan(scores.logprob[row]));
        EXPECT_TRUE(std::isnan(scores.entropy[row]));
        EXPECT_EQ(scores.argmax_id[row], -1);
      } else {
        EXPECT_EQ(scores.logprob[row], expected.logprob[row]);
        EXPECT_EQ(scores.entropy[row], expected.entropy[row]);
      }
    }
  }
}

TEST_F(FusedScoresTest, RefuseBrokenBounds) {
  kernels::FusedPartialsParams params;
  params.num_rows = 1;
  EXPECT_EQ(LaunchPartials(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace logprobd::testing
