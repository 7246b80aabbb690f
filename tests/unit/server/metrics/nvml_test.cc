#include "server/metrics/nvml.h"

#include <gtest/gtest.h>

namespace logprobd {
namespace {

TEST(NvmlTest, GivesZerosForADeviceThatDoesNotExist) {
  const Nvml nvml;

  const GpuReadings readings = nvml.Read(4'095, "");

  EXPECT_FALSE(readings.is_read);
  EXPECT_EQ(readings.memory_free_bytes, 0);
  EXPECT_EQ(readings.utilization_ratio, 0);
}

}  // namespace
}  // namespace logprobd
