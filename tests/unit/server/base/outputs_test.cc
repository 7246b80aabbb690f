#include "server/base/outputs.h"

#include <vector>

#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;

TEST(OutputSetTest, HoldsTheOutputsThatWereAdded) {
  const OutputSet set = OutputSet().With(Output::kLse).With(Output::kGreedy);

  EXPECT_TRUE(set.Has(Output::kLse));
  EXPECT_TRUE(set.Has(Output::kGreedy));
  EXPECT_FALSE(set.Has(Output::kLogprob));
  EXPECT_EQ(set.bits(), 4U + 16U);
}

TEST(OutputSetTest, UnionHoldsBoth) {
  const OutputSet set =
      OutputSet().With(Output::kLse).Union(OutputSet().With(Output::kLogprob).With(Output::kLse));

  EXPECT_EQ(set.bits(), 1U + 4U);
  EXPECT_TRUE(OutputSet().empty());
  EXPECT_FALSE(set.empty());
}

TEST(OutputColumnTest, IsReturnedForItsOutputsAndScoredForDerivedOutputs) {
  std::vector<absl::string_view> returned;
  std::vector<absl::string_view> scored;
  ForEachOutputColumn([&](const auto& column) {
    if (column.shape != ColumnShape::kRow) return;
    if (column.IsReturned(Output::kGreedy)) returned.push_back(column.name);
    if (column.IsScored(Output::kGreedy)) scored.push_back(column.name);
  });

  EXPECT_THAT(returned, ElementsAre("greedy"));
  EXPECT_THAT(scored, ElementsAre("argmax_id"));
}

TEST(OutputColumnTest, CountsItsBytes) {
  const ColumnCounts rows{.rows = 10};
  EXPECT_EQ(ColumnBytes(OutputSet(), rows), 0);
  EXPECT_EQ(ColumnBytes(Output::kLogprob, rows), 40);
  EXPECT_EQ(ColumnBytes(Output::kArgmax, rows), 80);  // id and logprob
  EXPECT_EQ(ColumnBytes(Output::kGreedy, rows), 10);
  EXPECT_EQ(ColumnBytes(OutputSet(kAllOutputBits), rows), 10 * (9 * 4 + 1));
  EXPECT_EQ(ColumnBytes(OutputSet(), {.rows = 2, .top_k = 5}), 2 * 5 * 8);
  EXPECT_EQ(ColumnBytes(OutputSet(), {.rows = 2, .candidates = 7}), 7 * 4);
  EXPECT_EQ(ColumnBytes(OutputSet(), {.rows = 2, .segments = 3}), 3 * (8 + 4 + 1));
}

}  // namespace
}  // namespace logprobd
