#include "kernels/common/logit_transform.h"

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

TEST(TruncationTest, GrowsWithTheNumberOfProducts) {
  EXPECT_DOUBLE_EQ(TruncationCorrection(0), 1.0);
  EXPECT_NEAR(TruncationCorrection(4'096) - 1.0, 3.83e-6, 0.01e-6);
}

}  // namespace
}  // namespace logprobd::kernels
