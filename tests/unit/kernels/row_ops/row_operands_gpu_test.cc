#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/row_ops/row_constants.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;

constexpr double kLog2Factor = 1.4426950408889634;

/// Places, temperatures and targets of rows on a device, and what is made of them.
class RowOperandsTest : public testing::GpuTest {};

TEST_F(RowOperandsTest, EachRowHasItsOwnScaleAndItsTargetsColumn) {
  const std::vector<double> temperature_values = {1.0, 0.7, 2.0, 1e-3, 0.1};
  const DeviceArray<double> temperatures(temperature_values);
  const DeviceArray<int64_t> targets(std::vector<int64_t>{99, 100, 149, 150, -100});
  const std::vector<int64_t> place_values = {4, 2, 0, 3, 1};
  const DeviceArray<int64_t> row_indices(place_values);
  const DeviceArray<float> log2_scales(std::vector<float>(5, -1.0F));
  const DeviceArray<int32_t> columns(std::vector<int32_t>(5, -7));
  const DeviceArray<float> target_logits(std::vector<float>(5, 3.0F));
  const DeviceArray<uint64_t> max_keys(std::vector<uint64_t>(5, 9));
  RowOperandsParams params;
  params.num_rows = 5;
  params.source = {
      row_indices.data(), targets.data(), temperatures.data(), 1.0, kLog2Factor, 100, 50};
  params.log2_scales = log2_scales.data();
  params.target_columns = columns.data();
  params.target_logits = target_logits.data();
  params.max_keys = max_keys.data();

  ASSERT_EQ(LaunchRowOperands(params, nullptr), cudaSuccess);

  const std::vector<float> scales = log2_scales.Read();
  for (size_t i = 0; i < scales.size(); ++i) {
    const double temperature = temperature_values[static_cast<size_t>(place_values[i])];
    EXPECT_EQ(scales[i], static_cast<float>(kLog2Factor / temperature)) << i;
  }
  EXPECT_EQ(columns.Read(), (std::vector<int32_t>{-1, 49, -1, -1, 0}));
  EXPECT_EQ(target_logits.Read(), std::vector<float>(5, 0.0F));
  EXPECT_EQ(max_keys.Read(), std::vector<uint64_t>(5, 0));
}

TEST_F(RowOperandsTest, OneTemperatureAndNoPlacesServeAllRows) {
  const DeviceArray<int64_t> targets(std::vector<int64_t>(300, 7));
  const DeviceArray<float> log2_scales(std::vector<float>(300));
  const DeviceArray<int32_t> columns(std::vector<int32_t>(300));
  const DeviceArray<float> target_logits(std::vector<float>(300));
  RowOperandsParams params;
  params.num_rows = 300;
  params.source = {nullptr, targets.data(), nullptr, 0.5, kLog2Factor, 0, 10};
  params.log2_scales = log2_scales.data();
  params.target_columns = columns.data();
  params.target_logits = target_logits.data();

  ASSERT_EQ(LaunchRowOperands(params, nullptr), cudaSuccess);

  EXPECT_EQ(log2_scales.Read(), std::vector<float>(300, static_cast<float>(2 * kLog2Factor)));
  EXPECT_EQ(columns.Read(), std::vector<int32_t>(300, 7));
}

TEST_F(RowOperandsTest, RefusesBrokenBoundsAndDoesNothingForNoRows) {
  RowOperandsParams params;
  EXPECT_EQ(LaunchRowOperands(params, nullptr), cudaSuccess);
  params.num_rows = 1;
  EXPECT_EQ(LaunchRowOperands(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace logprobd::kernels
