#include "client/cli/bench/double_reference.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/client/cli/bench/model_case.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Ge;
using ::testing::Le;

// Sums of some hundred doubles of about 1 in another order.
constexpr double kRounding = 1e-12;

/// A model in memory and one row, with the truth by the definition.
class DoubleReferenceTest : public ::testing::Test {
 protected:
  DoubleReferenceTest() { SetWeight(RandomValues(128 * 8, 1)); }

  void SetWeight(const std::vector<float>& values) {
    weight_ = ElementsOf(values, Dtype::kBf16);
    model_.weight.type = ElementType::kBf16;
    model_.weight.shape = {128, 8};
    model_.weight.data = {reinterpret_cast<const std::byte*>(weight_.data()), weight_.size()};
  }

  ReferenceScore Score() {
    const std::vector<ReferenceRow> rows = {
        {.hidden = reinterpret_cast<const std::byte*>(hidden_.data()), .target = target_}};
    return ScoreInDouble(model_, head_, Dtype::kF16, rows, [](double) {})[0];
  }

  /// Without any care for overflow.
  ReferenceScore Truth() const {
    const auto* weight = reinterpret_cast<const std::byte*>(weight_.data());
    const auto* hidden = reinterpret_cast<const std::byte*>(hidden_.data());
    std::vector<double> logits;
    for (int64_t id = 0; id < 100; ++id) {
      double dot = 0;
      for (int64_t i = 0; i < 8; ++i) {
        dot += LoadElement(hidden, i, Dtype::kF16) * LoadElement(weight, id * 8 + i, Dtype::kBf16);
      }
      double logit = static_cast<double>(head_.scale) * dot;
      if (!model_.bias.empty()) logit += model_.bias[static_cast<size_t>(id)];
      const double cap = head_.softcap;
      logits.push_back(cap > 0 ? cap * std::tanh(logit / cap) : logit);
    }
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit);
    double entropy = 0;
    for (const double logit : logits) {
      const double logprob = logit - std::log(sum);
      entropy -= std::exp(logprob) * logprob;
    }
    return {.logprob = logits[static_cast<size_t>(target_)] - std::log(sum), .entropy = entropy};
  }

  void ExpectTruth() {
    const ReferenceScore found = Score();
    const ReferenceScore truth = Truth();
    EXPECT_NEAR(found.logprob, truth.logprob, kRounding);
    EXPECT_NEAR(found.entropy, truth.entropy, kRounding);
  }

  Head head_ = CaseHead();
  std::string weight_;
  std::string hidden_ = ElementsOf(RandomValues(8, 3), Dtype::kF16);
  int32_t target_ = 42;
  ModelHead model_;
};

TEST_F(DoubleReferenceTest, IsTheDefinition) { ExpectTruth(); }

TEST_F(DoubleReferenceTest, AppliesScaleThenBiasThenCap) {
  head_.scale = 0.5F;
  head_.softcap = 2.0F;
  const std::vector<float> bias = RandomValues(128, 4);
  model_.bias.assign(bias.begin(), bias.end());

  ExpectTruth();
}

TEST_F(DoubleReferenceTest, ScoresTheFirstAndTheLastId) {
  for (const int32_t target : {0, 63, 64, 99}) {
    target_ = target;
    ExpectTruth();
  }
}

TEST_F(DoubleReferenceTest, LeavesPaddingOut) {
  std::vector<float> values = RandomValues(128 * 8, 1);
  const ReferenceScore before = Score();
  for (size_t i = 100 * 8; i < values.size(); ++i) values[i] = 1e3F;
  SetWeight(values);

  EXPECT_EQ(Score().logprob, before.logprob);
}

TEST_F(DoubleReferenceTest, DoesNotOverflow) {
  std::vector<float> values(128 * 8, 0.0F);
  values[42 * 8] = 1e6F;
  SetWeight(values);
  hidden_ = ElementsOf({100, 0, 0, 0, 0, 0, 0, 0}, Dtype::kF16);

  EXPECT_EQ(Score().logprob, 0);
  EXPECT_EQ(Score().entropy, 0);
  target_ = 7;
  EXPECT_LT(Score().logprob, -9e7);
}

TEST_F(DoubleReferenceTest, OfEqualLogitsTheEntropyIsLogVocabulary) {
  SetWeight(std::vector<float>(128 * 8, 0.0F));

  EXPECT_NEAR(Score().logprob, -std::log(100), kRounding);
  EXPECT_NEAR(Score().entropy, std::log(100), kRounding);
}

TEST_F(DoubleReferenceTest, ReportsItsProgress) {
  std::vector<double> shares;
  const std::vector<ReferenceRow> rows = {
      {.hidden = reinterpret_cast<const std::byte*>(hidden_.data()), .target = 1}};

  ScoreInDouble(model_, head_, Dtype::kF16, rows, [&](double share) { shares.push_back(share); });

  EXPECT_THAT(shares, Each(AllOf(Ge(0), Le(1))));
}

}  // namespace
}  // namespace logprobd::client
