// Tests that scores match the reference in double precision for all shapes, dtypes, ranges of
// logits, transforms and temperatures.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/engine_suite.h"

namespace logprobd::testing {
namespace {

constexpr OutputSet kWithoutArgmax =
    OutputSet(kAllOutputBits & ~static_cast<uint32_t>(Output::kArgmax));

TEST_P(EngineSuite, MatchesTheReferenceAtEveryVocabularyEdge) {
  for (const int64_t vocab_size : {1, 2, 125, 191, 192, 193, 384, 385, 1000}) {
    SCOPED_TRACE(absl::StrCat("vocab ", vocab_size));
    const auto head = MakeRandomHead({.vocab_size = vocab_size, .hidden_size = 64});
    ExpectMatchesReference(*head, MakeRandomCase(*head, 5), tolerances().logprob);
  }
}

TEST_P(EngineSuite, MatchesTheReferenceAtEveryHiddenSize) {
  for (const int64_t hidden_size : {1, 2, 8, 31, 32, 70, 123, 127, 128, 129, 520, 896}) {
    SCOPED_TRACE(absl::StrCat("hidden ", hidden_size));
    const auto head = MakeRandomHead({.vocab_size = 400, .hidden_size = hidden_size});
    ExpectMatchesReference(*head, MakeRandomCase(*head, 3), tolerances().logprob);
  }
}

TEST_P(EngineSuite, MatchesTheReferenceAtEveryRowCount) {
  const auto head = MakeRandomHead({.vocab_size = 210, .hidden_size = 40});
  for (const int64_t num_rows : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 129, 257}) {
    SCOPED_TRACE(absl::StrCat("rows ", num_rows));
    ExpectMatchesReference(*head, MakeRandomCase(*head, num_rows), tolerances().logprob);
  }
}

TEST_P(EngineSuite, MatchesTheReferenceAtARealVocabulary) {
  const auto head = MakeRandomHead({.vocab_size = 49'159, .hidden_size = 123});
  ExpectMatchesReference(*head, MakeRandomCase(*head, 3), tolerances().logprob);
}

TEST_P(EngineSuite, MatchesTheReferenceForEveryPairOfDtypes) {
  for (const Dtype weight_dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Dtype hidden_dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      SCOPED_TRACE(
          absl::StrCat("hidden ", DtypeName(hidden_dtype), ", head ", DtypeName(weight_dtype)));
      for (const int64_t hidden_size : {33, 300}) {
        const auto head =
            MakeRandomHead({.vocab_size = 500, .hidden_size = hidden_size, .dtype = weight_dtype});
        ExpectMatchesReference(*head, MakeRandomCase(*head, 9, hidden_dtype), tolerances().logprob);
      }
    }
  }
}

TEST_P(EngineSuite, NeverRoundsFloat32HiddenStates) {
  const auto head = MakeRandomHead({.vocab_size = 3000, .hidden_size = 1024, .dtype = Dtype::kF32});

  ExpectMatchesReference(*head, MakeRandomCase(*head, 40, Dtype::kF32), tolerances().logprob_f32);
}

TEST_P(EngineSuite, MatchesTheReferenceFromNarrowToWideLogits) {
  for (const double logit_stddev : {0.01, 1.0, 3.0, 10.0, 20.0}) {
    SCOPED_TRACE(absl::StrCat("standard deviation ", logit_stddev));
    const auto head =
        MakeRandomHead({.vocab_size = 2000, .hidden_size = 1024, .logit_stddev = logit_stddev});
    ExpectMatchesReference(*head, MakeRandomCase(*head, 24),
                           logit_stddev > 3 ? tolerances().logprob_wide : tolerances().logprob);
  }
}

TEST_P(EngineSuite, APeakedRowHasLogprobAndEntropyNearZero) {
  // Row 555 of the weight equals the first hidden row, so its logit is far above all others.
  const auto base = MakeRandomHead({.vocab_size = 700, .hidden_size = 96});
  EngineCase inputs = MakeRandomCase(*base, 2);
  std::vector<std::byte> weight(base->weight(), base->weight() + base->info().weight_bytes);
  std::copy_n(inputs.hidden.begin(), 96 * 2, weight.begin() + 555 * 96 * 2);
  const InMemoryHead head(base->info(), weight);
  inputs.targets = {555, 555};

  ExpectMatchesReference(head, inputs, tolerances().logprob_wide);

  const auto engine = Create(head);
  ASSERT_NE(engine, nullptr);
  const EngineScores scores = RunCase(*engine, inputs);
  EXPECT_NEAR(scores.logprob[0], 0.0, 1e-6);
  EXPECT_NEAR(scores.entropy[0], 0.0, 1e-5);
  EXPECT_EQ(scores.argmax_id[0], 555);
}

TEST_P(EngineSuite, AFlatRowHasTheEntropyOfTheWholeVocabulary) {
  for (const int64_t vocab_size : {1, 192, 777, 30'000}) {
    SCOPED_TRACE(absl::StrCat("vocab ", vocab_size));
    const auto head =
        MakeRandomHead({.vocab_size = vocab_size, .hidden_size = 8, .logit_stddev = 0});
    const EngineCase inputs = MakeRandomCase(*head, 2);
    const auto engine = Create(*head);
    ASSERT_NE(engine, nullptr);

    const EngineScores scores = RunCase(*engine, inputs);

    const double log_vocab = std::log(static_cast<double>(vocab_size));
    EXPECT_NEAR(scores.logprob[1], -log_vocab, 2e-6);
    EXPECT_NEAR(scores.entropy[1], log_vocab, 2e-6);
    EXPECT_EQ(scores.argmax_id[1], 0);  // the lowest id wins ties
  }
}

/// Returns a head with hidden size 1. For the hidden row (1), the logits equal the weights.
std::unique_ptr<InMemoryHead> HeadOfLogits(const std::vector<float>& logits) {
  HeadInfo info;
  info.hidden_size = 1;
  info.vocab_size = info.vocab_rows = static_cast<int64_t>(logits.size());
  info.dtype = Dtype::kF32;
  return std::make_unique<InMemoryHead>(info, EncodeFloats(logits, Dtype::kF32));
}

EngineCase OneRow(int32_t target) {
  EngineCase inputs;
  inputs.dtype = Dtype::kF32;
  inputs.hidden_size = 1;
  inputs.hidden = EncodeFloats({1.0F}, Dtype::kF32);
  inputs.targets = {target};
  inputs.temperatures = {1.0F};
  return inputs;
}

TEST_P(EngineSuite, MatchesTheReferenceForLogitsFarBelowZero) {
  std::vector<float> logits = NormalValues(600, 5);
  for (float& z : logits) z -= 200.0F;
  ExpectMatchesReference(*HeadOfLogits(logits), OneRow(300), tolerances().logprob_wide);
}

TEST_P(EngineSuite, MatchesTheReferenceForLogitsFarAboveZero) {
  std::vector<float> logits = NormalValues(600, 6);
  for (float& z : logits) z += 500.0F;
  ExpectMatchesReference(*HeadOfLogits(logits), OneRow(300), tolerances().logprob_wide);
}

TEST_P(EngineSuite, CombinesTilesWithVeryDifferentLogits) {
  // The logits of the first tile are 150 above those of the last one, which contains the target.
  std::vector<float> logits = NormalValues(576, 7);
  for (size_t i = 0; i < 192; ++i) logits[i] += 100.0F;
  for (size_t i = 384; i < 576; ++i) logits[i] -= 50.0F;
  ExpectMatchesReference(*HeadOfLogits(logits), OneRow(575), tolerances().logprob_wide);
}

TEST_P(EngineSuite, AppliesScaleBiasAndSoftcap) {
  const RandomHeadOptions base{.vocab_size = 450, .hidden_size = 80, .logit_stddev = 8};
  RandomHeadOptions scaled = base;
  scaled.scale = 0.0625F * 3;
  RandomHeadOptions biased = base;
  biased.bias = true;
  RandomHeadOptions capped = base;
  capped.softcap = 15;
  RandomHeadOptions all = base;
  all.scale = 1.75F;
  all.bias = true;
  all.softcap = 30;
  RandomHeadOptions barely_capped = base;
  barely_capped.softcap = 1000;
  for (const RandomHeadOptions& options : {scaled, biased, capped, all, barely_capped}) {
    SCOPED_TRACE(
        absl::StrCat("scale ", options.scale, ", bias ", options.bias, ", cap ", options.softcap));
    const auto head = MakeRandomHead(options);
    EngineCase inputs = MakeRandomCase(*head, 11);
    // A soft cap can make the largest logits equal in float, so the argmax is tested without one.
    inputs.outputs = options.softcap > 0 ? kWithoutArgmax : inputs.outputs;
    ExpectMatchesReference(*head, inputs, tolerances().logprob_wide);
  }
}

TEST_P(EngineSuite, IgnoresPaddingRowsOfTheWeight) {
  for (const int64_t vocab_size : {190, 192, 380}) {
    SCOPED_TRACE(absl::StrCat("vocab ", vocab_size));
    const auto head =
        MakeRandomHead({.vocab_size = vocab_size, .hidden_size = 48, .padding_rows = 70});
    ExpectMatchesReference(*head, MakeRandomCase(*head, 9), tolerances().logprob);
  }
}

TEST_P(EngineSuite, EachRowHasItsOwnTemperature) {
  const auto head = MakeRandomHead({.vocab_size = 500, .hidden_size = 64});
  EngineCase inputs = MakeRandomCase(*head, 8);
  inputs.temperatures = {0.01F, 0.1F, 0.5F, 0.7F, 1.0F, 1.5F, 10.0F, 100.0F};

  ExpectMatchesReference(*head, inputs, tolerances().logprob);
}

TEST_P(EngineSuite, EntropyHasItsOwnTemperature) {
  const auto head = MakeRandomHead({.vocab_size = 500, .hidden_size = 64});
  EngineCase inputs = MakeRandomCase(*head, 5);
  inputs.temperatures = {0.6F, 2.0F, 1.0F, 0.05F, 50.0F};
  inputs.entropy_temperatures = {1.0F, 0.5F, 1.0F, 20.0F, 0.1F};

  ExpectMatchesReference(*head, inputs, tolerances().logprob);
}

TEST_P(EngineSuite, AnInfinitelyNegativeLogitHasNoProbability) {
  std::vector<float> logits = NormalValues(400, 8);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::fill(logits.begin(), logits.begin() + 192, -kInfinity);  // a whole tile
  logits[250] = -kInfinity;
  const auto head = HeadOfLogits(logits);
  EngineCase inputs = OneRow(250);
  inputs.outputs = OutputSet(kAllOutputBits & ~static_cast<uint32_t>(Output::kLogprob) &
                             ~static_cast<uint32_t>(Output::kMinLogit) &
                             ~static_cast<uint32_t>(Output::kTargetRank));
  ExpectMatchesReference(*head, inputs, tolerances().logprob);
  inputs.outputs =
      OutputSet().With(Output::kLogprob).With(Output::kMinLogit).With(Output::kTargetRank);

  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);
  const EngineScores scores = RunCase(*engine, inputs);

  EXPECT_EQ(scores.logprob[0], -kInfinity);
  EXPECT_EQ(scores.min_logit[0], -kInfinity);
  EXPECT_EQ(scores.target_rank[0], 399);  // all finite logits, and 192 equal ones with lower ids
}

}  // namespace
}  // namespace logprobd::testing
