#include "client/cpp/head_agreement.h"

#include <string>
#include <utility>

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

ServerInfo InfoOf(Head head) {
  head.name = std::string("h");
  return {.heads = {std::move(head)}};
}

TEST(DescribeDifferenceTest, NamesTheFirstFactThatScoresDependOn) {
  const ServerInfo one = InfoOf({.vocab_size = 10, .hidden_size = 4});

  EXPECT_EQ(DescribeDifference(one, one), "");
  EXPECT_EQ(DescribeDifference(one, InfoOf({.vocab_size = 11, .hidden_size = 4})),
            "vocab_size of \"h\" is 10 and 11");
  EXPECT_EQ(DescribeDifference(one, InfoOf({.vocab_size = 10, .hidden_size = 5})),
            "hidden_size of \"h\" is 4 and 5");
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.dtype = Dtype::kF32})),
            "dtype of \"h\" is bf16 and f32");
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.scale = 2.0F})), "scale of \"h\" is 1 and 2");
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.softcap = 30.0F})),
            "softcap of \"h\" is 0 and 30");
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.has_bias = true})),
            "has_bias of \"h\" is false and true");
  EXPECT_EQ(DescribeDifference(InfoOf({.model_type = "a"}), InfoOf({.model_type = "b"})),
            "model_type of \"h\" is a and b");
  EXPECT_EQ(DescribeDifference(InfoOf({}), {.heads = {{.name = "x"}, {.name = "h"}}}),
            "their names are \"h\" and \"h, x\"");
}

TEST(DescribeDifferenceTest, LetsVersionsPlacesAndLimitsDiffer) {
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.weights_version = 7,
                                                   .tied = true,
                                                   .tensor = "t",
                                                   .engine = "cpu",
                                                   .limits = {.request_rows_max = 1}})),
            "");
}

TEST(TightestLimitsTest, TakesTheLeastOfEachThatIsKnown) {
  const ServerInfo one = InfoOf({.limits = {.request_rows_max = 7, .top_k_max = 0}});
  const ServerInfo two = InfoOf({.limits = {.request_rows_max = 9, .top_k_max = 5}});

  const Limits limits = TightestLimits({one, two}).heads[0].limits;

  EXPECT_EQ(limits.request_rows_max, 7);
  EXPECT_EQ(limits.top_k_max, 5);
}

}  // namespace
}  // namespace logprobd::client
