#include "client/cli/bench/verification.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Returns an answer whose row i has logprob -(first + i).
ScoreResult Scores(int64_t first, int64_t rows) {
  ScoreResult result;
  result.rows = rows;
  result.weights_version = 3;
  for (int64_t row = first; row < first + rows; ++row) {
    result.logprob.push_back(-static_cast<float>(row));
    result.entropy.push_back(static_cast<float>(row) / 2);
  }
  return result;
}

TEST(BaselineTest, FindsNoDifferenceBetweenEqualAnswers) {
  Baseline baseline(100);

  baseline.Add(0, Scores(0, 10));
  baseline.Add(5, Scores(5, 10));

  EXPECT_EQ(baseline.checks().compared, 5);
  EXPECT_EQ(baseline.checks().different, 0);
  EXPECT_THAT(baseline.checks().first_difference, IsEmpty());
}

TEST(BaselineTest, DetectsASingleBit) {
  Baseline baseline(100);
  ScoreResult other = Scores(0, 10);
  other.entropy[7] = std::nextafter(other.entropy[7], 100.0F);

  baseline.Add(0, Scores(0, 10));
  baseline.Add(0, other);

  EXPECT_EQ(baseline.checks().different, 1);
  EXPECT_THAT(baseline.checks().first_difference,
              HasSubstr("row 7 of the load, in a request of 10 rows"));
}

TEST(BaselineTest, ComparesEveryOutput) {
  const auto full = [] {
    ScoreResult result = Scores(0, 2);
    result.lse = {1, 2};
    result.argmax_id = {3, 4};
    result.argmax_logprob = {-1, -2};
    result.greedy = {0, 1};
    result.sum_p_squared = {0.5F, 0.25F};
    result.max_logit = {7, 8};
    result.min_logit = {-7, -8};
    result.target_rank = {5, 6};
    result.top_k = 2;
    result.top_k_ids = {1, 2, 3, 4};
    result.top_k_logprobs = {-1, -2, -3, -4};
    return result;
  };
  const std::vector<void (*)(ScoreResult&)> changes = {[](ScoreResult& r) { r.logprob[1] = -9; },
                                                       [](ScoreResult& r) { r.lse[1] = 9; },
                                                       [](ScoreResult& r) { r.argmax_id[1] = 9; },
                                                       [](ScoreResult& r) { r.argmax_logprob[1] = 9; },
                                                       [](ScoreResult& r) { r.greedy[1] = 0; },
                                                       [](ScoreResult& r) { r.sum_p_squared[1] = 9; },
                                                       [](ScoreResult& r) { r.max_logit[1] = 9; },
                                                       [](ScoreResult& r) { r.min_logit[1] = 9; },
                                                       [](ScoreResult& r) { r.target_rank[1] = 9; },
                                                       [](ScoreResult& r) { r.top_k_ids[3] = 9; },
                                                       [](ScoreResult& r) { r.top_k_logprobs[3] = 9; }};

  for (size_t i = 0; i < changes.size(); ++i) {
    Baseline baseline(2);
    ScoreResult changed = full();
    changes[i](changed);

    baseline.Add(0, full());
    baseline.Add(0, changed);

    EXPECT_EQ(baseline.checks().different, 1) << "change " << i;
  }
}

TEST(BaselineTest, ComparesTheRepeatedRowsOfOneAnswer) {
  Baseline baseline(3);

  baseline.Add(2, Scores(2, 3));  // rows 2, 0, 1: logprobs -2, -3, -4
  baseline.Add(0, Scores(0, 1));  // row 0: -0

  EXPECT_EQ(baseline.checks().compared, 1);
  EXPECT_EQ(baseline.checks().different, 1);
}

TEST(BaselineTest, CountsRowsThatAreNotFinite) {
  Baseline baseline(3);
  ScoreResult result = Scores(0, 3);
  result.logprob[1] = std::numeric_limits<float>::quiet_NaN();
  result.entropy[2] = std::numeric_limits<float>::infinity();

  baseline.Add(0, result);

  EXPECT_EQ(baseline.checks().nonfinite, 2);
}

TEST(BaselineTest, ReportsAChangeOfTheWeights) {
  Baseline baseline(3);
  ScoreResult swapped = Scores(0, 1);
  swapped.weights_version = 4;

  baseline.Add(0, Scores(0, 1));
  baseline.Add(0, swapped);

  EXPECT_EQ(baseline.checks().different, 1);
  EXPECT_THAT(baseline.checks().first_difference,
              HasSubstr("the weights changed from version 3 to 4"));
}

TEST(BaselineTest, ComparesAnswersWithoutLogprobAndEntropy) {
  Baseline baseline(3);
  ScoreResult result;
  result.rows = 1;
  result.lse = {2};

  baseline.Add(0, result);
  baseline.Add(0, result);
  result.lse = {3};
  baseline.Add(0, result);

  EXPECT_EQ(baseline.checks().compared, 2);
  EXPECT_EQ(baseline.checks().different, 1);
}

}  // namespace
}  // namespace logprobd::client
