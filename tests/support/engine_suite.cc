#include "tests/support/engine_suite.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace logprobd::testing {
namespace {

/// Relative tolerance for probabilities.
constexpr double kProbabilityTolerance = 1e-3;

}  // namespace

void EngineSuite::SetUp() {
  if (!GetParam().skip_reason.empty()) {
    GTEST_SKIP() << GetParam().skip_reason;
  }
}

std::unique_ptr<ScoringEngine> EngineSuite::Create(const HeadWeights& head,
                                                   int64_t batch_rows_max) {
  auto engine = GetParam().create(head, batch_rows_max);
  if (!engine.ok()) {
    ADD_FAILURE() << engine.status();
    return nullptr;
  }
  return *std::move(engine);
}

void EngineSuite::ExpectMatchesReference(const InMemoryHead& head, const EngineCase& inputs,
                                         double logprob_tolerance) {
  const std::unique_ptr<ScoringEngine> engine = Create(head, inputs.num_rows());
  ASSERT_NE(engine, nullptr);
  const EngineScores scores = RunCase(*engine, inputs);
  ASSERT_TRUE(scores.status.ok()) << scores.status;

  const OutputSet outputs = inputs.outputs;
  size_t candidate = 0;
  for (int64_t row = 0; row < inputs.num_rows(); ++row) {
    SCOPED_TRACE(absl::StrCat("row ", row));
    const auto i = static_cast<size_t>(row);
    const kernels::RowReference truth = ReferenceOf(head, inputs, row);
    const double sharpness = std::max(1.0, 1.0 / static_cast<double>(inputs.temperatures[i]));
    const double tolerance = logprob_tolerance * sharpness;
    // Rounding the result to float adds an error of up to half a unit in the last place.
    const auto near = [&](double value) { return tolerance + std::fabs(value) * 1.2e-7; };
    EXPECT_EQ(scores.nonfinite[i], 0);
    if (outputs.Has(Output::kLogprob)) {
      EXPECT_NEAR(scores.logprob[i], truth.logprob, near(truth.logprob));
      EXPECT_LE(scores.logprob[i], 0.0F);
    }
    if (outputs.Has(Output::kEntropy)) {
      double entropy_sharpness = sharpness;
      if (!inputs.entropy_temperatures.empty()) {
        entropy_sharpness =
            std::max(1.0, 1.0 / static_cast<double>(inputs.entropy_temperatures[i]));
      }
      EXPECT_NEAR(scores.entropy[i], truth.entropy, tolerances().entropy * entropy_sharpness);
      EXPECT_GE(scores.entropy[i], 0.0F);
      EXPECT_LE(scores.entropy[i],
                static_cast<float>(std::log(static_cast<double>(head.info().vocab_size))));
    }
    if (outputs.Has(Output::kLse)) {
      EXPECT_NEAR(scores.lse[i], truth.lse, near(truth.lse));
    }
    if (outputs.Has(Output::kArgmax)) {
      EXPECT_EQ(scores.argmax_id[i], truth.argmax_id);
      EXPECT_NEAR(scores.argmax_logprob[i], truth.argmax_logprob, near(truth.argmax_logprob));
    }
    if (outputs.Has(Output::kSumPSquared)) {
      EXPECT_NEAR(scores.sum_p_squared[i], truth.sum_p_squared,
                  kProbabilityTolerance * sharpness * truth.sum_p_squared);
      EXPECT_LE(scores.sum_p_squared[i], 1.0F);
    }
    if (outputs.Has(Output::kMaxLogit)) {
      EXPECT_NEAR(scores.max_logit[i], truth.max_logit, near(truth.max_logit));
    }
    if (outputs.Has(Output::kMinLogit)) {
      EXPECT_NEAR(scores.min_logit[i], truth.min_logit, near(truth.min_logit));
    }
    if (outputs.Has(Output::kTargetRank)) {
      // Logits that are closer to the target's than the errors may count or not.
      const std::vector<double> logits = LogitsOf(head, inputs, row);
      const double target = logits[static_cast<size_t>(inputs.targets[i])];
      const double error = near(std::max(std::fabs(truth.max_logit), std::fabs(truth.min_logit)));
      const auto count_above = [&](double bound) {
        return std::count_if(logits.begin(), logits.end(), [&](double z) { return z > bound; });
      };
      EXPECT_GE(scores.target_rank[i], count_above(target + error));
      EXPECT_LT(scores.target_rank[i], count_above(target - error));
    }
    const auto top_k = static_cast<size_t>(inputs.top_k);
    for (size_t k = 0; k < truth.top_k_ids.size(); ++k) {
      const size_t at = i * top_k + k;
      EXPECT_EQ(scores.top_k_ids[at], truth.top_k_ids[k]) << "rank " << k;
      EXPECT_NEAR(scores.top_k_logprobs[at], truth.top_k_logprobs[k],
                  near(truth.top_k_logprobs[k]));
    }
    for (const double logprob : truth.candidate_logprobs) {
      EXPECT_NEAR(scores.candidate_logprobs[candidate], logprob, near(logprob))
          << "candidate " << inputs.candidate_ids[candidate];
      ++candidate;
    }
  }
}

}  // namespace logprobd::testing
