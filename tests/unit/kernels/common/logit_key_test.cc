#include "kernels/common/logit_key.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

TEST(LogitKeyTest, NextAboveIsTheSmallestLargerFloat) {
  using Limits = std::numeric_limits<float>;
  for (const float value : {1.0F, -1.0F, 0.1F, 0.0F, -0.0F, Limits::denorm_min(),
                            -Limits::denorm_min(), Limits::lowest(), -Limits::infinity()}) {
    EXPECT_EQ(NextAbove(value), std::nextafter(value, Limits::infinity())) << value;
  }
  EXPECT_EQ(NextAbove(Limits::max()), Limits::infinity());
  // Nothing is above these, and nothing compares as at least NaN.
  EXPECT_TRUE(std::isnan(NextAbove(Limits::infinity())));
  EXPECT_TRUE(std::isnan(NextAbove(Limits::quiet_NaN())));
}

}  // namespace
}  // namespace logprobd::kernels
