#include "server/base/device_name.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

namespace logprobd {
namespace {

TEST(DeviceNameTest, FindsTheOrdinalOfAGpuByItsName) {
  for (const int32_t ordinal : {0, 7, 12}) {
    EXPECT_EQ(GpuOrdinal(GpuName(ordinal)), ordinal);
  }
  EXPECT_EQ(GpuName(12), "gpu12");
}

TEST(DeviceNameTest, FindsNoneInOtherNames) {
  for (const char* name : {"cpu", "host", "gpu", "gpu1x", ""}) {
    EXPECT_EQ(GpuOrdinal(name), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace logprobd
