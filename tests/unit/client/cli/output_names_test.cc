#include "client/cli/output_names.h"

#include <string>

#include "client/cpp/score.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;

TEST(OutputNamesTest, AddsUpTheNamedBits) {
  EXPECT_EQ(*ParseOutputs({"logprob"}), output::kLogprob);
  EXPECT_EQ(*ParseOutputs({"argmax", "min_logit", "argmax"}), output::kArgmax | output::kMinLogit);
  EXPECT_EQ(*ParseOutputs({"greedy", "sum_p_squared"}), output::kGreedy | output::kSumPSquared);
  EXPECT_EQ(*ParseOutputs({"all"}), 255U);
}

TEST(OutputNamesTest, ListsTheNamesWhenOneIsNotKnown) {
  EXPECT_THAT(std::string(ParseOutputs({"logits"}).status().message()),
              HasSubstr("output \"logits\" is not known: choose of logprob, entropy"));
}

}  // namespace
}  // namespace logprobd::client
