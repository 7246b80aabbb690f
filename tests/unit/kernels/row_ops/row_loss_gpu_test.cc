#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/row_ops/row_loss.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;

class RowLossTest : public testing::GpuTest {};

std::vector<float> Normal(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(-10, 5);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

float LossOf(int64_t num_rows, const DeviceArray<float>& scores, const DeviceArray<float>& weights,
             int64_t stride) {
  const DeviceArray<float> loss(std::vector<float>{77.0F, 77.0F});
  RowLossParams params;
  params.num_rows = num_rows;
  params.scores[2] = {.scores = scores.data(), .weights = {weights.data(), stride}};
  params.loss = loss.data();
  EXPECT_EQ(LaunchRowLoss(params, nullptr), cudaSuccess);
  const std::vector<float> found = loss.Read();
  EXPECT_EQ(found[1], 77.0F);
  return found[0];
}

TEST_F(RowLossTest, IsTheSumOfTheScoresTimesTheirWeights) {
  for (const size_t rows : {1, 1'023, 1'024, 1'025, 100'000}) {
    const std::vector<float> scores = Normal(rows, 1);
    const std::vector<float> weights = Normal(rows, 2);
    double truth = 0;
    double size = 0;
    for (size_t i = 0; i < rows; ++i) {
      const double term = static_cast<double>(scores[i]) * static_cast<double>(weights[i]);
      truth += term;
      size += std::fabs(term);
    }
    const float loss = LossOf(static_cast<int64_t>(rows), DeviceArray<float>(scores),
                              DeviceArray<float>(weights), 1);
    EXPECT_NEAR(loss, truth, 0x1p-24 * std::fabs(truth) + 1e-12 * size) << rows << " rows";
  }
}

TEST_F(RowLossTest, EveryKindOfScoreContributes) {
  const DeviceArray<float> scores(std::vector<float>{1, 2, 3});
  const DeviceArray<float> weights(std::vector<float>{1, 10, 100});
  const DeviceArray<float> loss(std::vector<float>(1));
  RowLossParams params;
  params.num_rows = 3;
  for (WeightedScore& score : params.scores) score = {scores.data(), {weights.data(), 1}};
  params.loss = loss.data();

  ASSERT_EQ(LaunchRowLoss(params, nullptr), cudaSuccess);

  EXPECT_EQ(loss.Read()[0], 4 * 321.0F);
}

TEST_F(RowLossTest, BroadcastsOneWeightToAllRows) {
  const DeviceArray<float> scores(std::vector<float>{1, 2, 4});
  const DeviceArray<float> weight(std::vector<float>{-0.5F});
  EXPECT_EQ(LossOf(3, scores, weight, 0), -3.5F);
}

TEST_F(RowLossTest, SkipsAScoreOfWeightZeroEvenIfItIsNan) {
  const DeviceArray<float> scores(
      std::vector<float>{1, std::numeric_limits<float>::quiet_NaN(), 4});
  const DeviceArray<float> weights(std::vector<float>{1, 0, 1});
  EXPECT_EQ(LossOf(3, scores, weights, 1), 5.0F);
}

TEST_F(RowLossTest, NoRowsGiveALossOfZero) {
  const DeviceArray<float> none(std::vector<float>(1));
  EXPECT_EQ(LossOf(0, none, none, 1), 0.0F);
}

TEST_F(RowLossTest, RefusesBrokenBounds) {
  const DeviceArray<float> values(std::vector<float>(2));
  RowLossParams good;
  good.num_rows = 2;
  good.scores[0] = {values.data(), {values.data(), 1}};
  good.loss = values.data();
  RowLossParams bad = good;
  bad.num_rows = -1;
  EXPECT_EQ(LaunchRowLoss(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.loss = nullptr;
  EXPECT_EQ(LaunchRowLoss(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.scores[0].scores = nullptr;
  EXPECT_EQ(LaunchRowLoss(bad, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace logprobd::kernels
