#include "kernels/common/logit_scale.h"

#include "gtest/gtest.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {
namespace {

constexpr double kCorrection = TruncationCorrection(8'192);

TEST(CorrectedLog2ScaleTest, ContainsTheCorrectionAndIsRoundedOnce) {
  for (const float temperature : {0.5F, 0.7F, 1.0F, 3.0F}) {
    const double exact = 1.4426950408889634 * kCorrection / static_cast<double>(temperature);

    EXPECT_EQ(CorrectedLog2Scale(temperature, kCorrection), static_cast<float>(exact));
    EXPECT_EQ(CorrectedLog2Scale(temperature, 1.0), Log2Scale(temperature));
  }
}

TEST(CorrectedTest, LeavesTheCorrectionToTheTemperatureWhereDotProductsAreLogits) {
  const CorrectedTransform corrected = Corrected({}, /*has_bias=*/false, kCorrection);

  EXPECT_EQ(corrected.correction, kCorrection);
  EXPECT_TRUE(corrected.transform.IsIdentity());
}

TEST(CorrectedTest, CorrectsTheScaleBeforeABiasOrACap) {
  const LogitTransform transforms[] = {{.scale = 0.3F}, {.softcap = 30.0F}, {0.3F, 30.0F}};
  for (const LogitTransform& transform : transforms) {
    const CorrectedTransform corrected = Corrected(transform, /*has_bias=*/false, kCorrection);

    EXPECT_EQ(corrected.correction, 1.0);
    EXPECT_EQ(corrected.transform.scale,
              static_cast<float>(static_cast<double>(transform.scale) * kCorrection));
    EXPECT_EQ(corrected.transform.softcap, transform.softcap);
  }
  const CorrectedTransform with_bias = Corrected({}, /*has_bias=*/true, kCorrection);
  EXPECT_EQ(with_bias.correction, 1.0);
  EXPECT_EQ(with_bias.transform.scale, static_cast<float>(kCorrection));
}

}  // namespace
}  // namespace logprobd::kernels
