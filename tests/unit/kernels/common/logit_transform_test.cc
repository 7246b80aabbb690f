#include "kernels/common/logit_transform.h"

#include "gtest/gtest.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {
namespace {

TEST(TruncationTest, GrowsWithTheNumberOfProducts) {
  EXPECT_DOUBLE_EQ(TruncationCorrection(0), 1.0);
  EXPECT_NEAR(TruncationCorrection(4'096) - 1.0, 3.83e-6, 0.01e-6);
}

TEST(TruncationTest, IsAFactorOfTheScaleOfATemperature) {
  const double correction = TruncationCorrection(8'192);

  EXPECT_FLOAT_EQ(Log2Scale(0.5F, correction),
                  static_cast<float>(2 * 1.4426950408889634 * correction));
  EXPECT_GT(Log2Scale(0.5F, correction), Log2Scale(0.5F));
  EXPECT_EQ(Log2Scale(0.5F, 1.0), Log2Scale(0.5F));
}

}  // namespace
}  // namespace logprobd::kernels
