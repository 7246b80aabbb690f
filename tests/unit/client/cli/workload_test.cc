#include "client/cli/workload.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::Lt;

Head SmallHead() {
  Head head;
  head.name = "h";
  head.hidden_size = 64;
  head.vocab_size = 100;
  return head;
}

TEST(WorkloadTest, RoundsToBf16ToNearestEven) {
  EXPECT_EQ(ToBf16(1.0F), 0x3F80);
  EXPECT_EQ(ToBf16(1.00390625F), 0x3F80);  // half way: to the even neighbour below
  EXPECT_EQ(ToBf16(1.01171875F), 0x3F82);  // half way: to the even neighbour above
  EXPECT_EQ(ToBf16(-2.0F), 0xC000);
  EXPECT_EQ(ToBf16(std::numeric_limits<float>::infinity()), 0x7F80);
}

TEST(WorkloadTest, RoundsToF16ToNearestEven) {
  EXPECT_EQ(ToF16(0.0F), 0x0000);
  EXPECT_EQ(ToF16(1.0F), 0x3C00);
  EXPECT_EQ(ToF16(-1.5F), 0xBE00);
  EXPECT_EQ(ToF16(1.0F + 0x1p-11F), 0x3C00);  // half way: to the even neighbour below
  EXPECT_EQ(ToF16(1.0F + 0x3p-11F), 0x3C02);  // half way: to the even neighbour above
  EXPECT_EQ(ToF16(2047.75F), 0x6800);         // rounds into the next power of two
  EXPECT_EQ(ToF16(65504.0F), 0x7BFF);
  EXPECT_EQ(ToF16(1e6F), 0x7C00);
  EXPECT_EQ(ToF16(0x1p-14F), 0x0400);  // least normal
  EXPECT_EQ(ToF16(0x1p-24F), 0x0001);  // least subnormal
  EXPECT_EQ(ToF16(0x1p-26F), 0x0000);
}

TEST(WorkloadTest, IsTheSameForTheSameSeed) {
  const Workload one(SmallHead(), Dtype::kBf16, 10, 1);
  const Workload again(SmallHead(), Dtype::kBf16, 10, 1);
  const Workload other(SmallHead(), Dtype::kBf16, 10, 2);

  EXPECT_EQ(one.args().hidden, again.args().hidden);
  EXPECT_EQ(one.args().targets, again.args().targets);
  EXPECT_NE(one.args().hidden, other.args().hidden);
}

TEST(WorkloadTest, IsStandardNormalWithTargetsInTheVocabulary) {
  const Workload workload(SmallHead(), Dtype::kF32, 1'000, 1);
  std::vector<float> values(64'000);
  std::memcpy(values.data(), workload.args().hidden.data(), values.size() * sizeof(float));

  double sum = 0;
  double squares = 0;
  for (const float value : values) {
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  // Six standard errors of 64,000 draws.
  EXPECT_NEAR(sum / 64'000, 0, 0.025);
  EXPECT_NEAR(squares / 64'000, 1, 0.035);
  EXPECT_THAT(workload.args().targets, Each(AllOf(Ge(0), Lt(100))));
}

TEST(WorkloadTest, RepeatsTheRowsOfALargeRequest) {
  Head head = SmallHead();
  head.hidden_size = 4096;

  const Workload workload(head, Dtype::kBf16, 1'025, 1);

  const size_t row_bytes = 4096 * 2;
  EXPECT_EQ(workload.args().hidden.subspan(0, row_bytes),
            workload.args().hidden.subspan(1'024 * row_bytes, row_bytes));
}

TEST(RangeTest, CountsFromStartToEnd) {
  EXPECT_THAT(*ParseRange("4"), ElementsAre(4));
  EXPECT_THAT(*ParseRange("1:3"), ElementsAre(1, 2, 3));
  EXPECT_THAT(*ParseRange("1:16:5"), ElementsAre(1, 6, 11, 16));
  EXPECT_THAT(*ParseRange("2:5:2"), ElementsAre(2, 4));
}

TEST(RangeTest, RefusesTheRest) {
  for (const char* text :
       {"", "0", "-1", "x", "1:", "3:1", "1:2:0", "1:2:3:4", "1:100000", "1:9223372036854775807"}) {
    EXPECT_FALSE(ParseRange(text).ok()) << text;
  }
}

}  // namespace
}  // namespace logprobd::client
