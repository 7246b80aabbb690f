#include "server/base/outputs.h"

#include "gtest/gtest.h"
#include "server/base/score_request.h"

namespace logprobd {
namespace {

TEST(OutputSetTest, HoldsWhatWasPutIn) {
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

TEST(OutputSetTest, AllBitsAreTheOutputs) {
  OutputSet set;
  for (const Output output :
       {Output::kLogprob, Output::kEntropy, Output::kLse, Output::kArgmax, Output::kGreedy,
        Output::kSumPSquared, Output::kMaxLogit, Output::kMinLogit}) {
    set = set.With(output);
  }
  EXPECT_EQ(set.bits(), OutputSet::kAllBits);
}

TEST(ScoreRequestTest, FillsInWhatWasNotSent) {
  ScoreRequest request;
  EXPECT_EQ(request.outputs().bits(), kDefaultOutputs.bits());
  EXPECT_EQ(request.priority(), Priority::kNormal);
  EXPECT_EQ(request.num_segments(), 0);

  request.output_bits = 8;
  request.priority_number = 3;
  request.segment_offsets = {0, 2, 5};

  EXPECT_TRUE(request.outputs().Has(Output::kArgmax));
  EXPECT_FALSE(request.outputs().Has(Output::kLogprob));
  EXPECT_EQ(request.priority(), Priority::kLow);
  EXPECT_EQ(request.num_segments(), 2);
}

}  // namespace
}  // namespace logprobd
