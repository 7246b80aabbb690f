#include "server/base/head_info.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace logprobd {
namespace {

TEST(DeviceNameTest, FindsTheOrdinalOfAGpuByItsName) {
  for (const int32_t ordinal : {0, 7, 12}) {
    EXPECT_EQ(GpuOrdinal(GpuName(ordinal)), ordinal);
  }
  EXPECT_EQ(GpuName(12), "gpu12");
}

TEST(DeviceNameTest, FindsNoOrdinalInOtherNames) {
  for (const char* name : {"cpu", "host", "gpu", "gpu1x", ""}) {
    EXPECT_EQ(GpuOrdinal(name), std::nullopt) << name;
  }
}

TEST(DeviceNameTest, FindsEachGpuOfALayoutOnce) {
  const std::vector<ShardPlace> layout = {
      {.device = "gpu2"}, {.device = "gpu0"}, {.device = "cpu"}, {.replica = 1, .device = "gpu2"}};

  EXPECT_EQ(GpusOf(layout), (std::vector<int32_t>{2, 0}));
}

TEST(DeviceNameTest, OnlyShardsOnGpusWaitForEachOther) {
  const std::vector<ShardPlace> replicas = {{.device = "gpu0"}, {.replica = 1, .device = "gpu1"}};
  const std::vector<ShardPlace> shards = {{.device = "gpu0"}, {.shard = 1, .device = "gpu1"}};
  const std::vector<ShardPlace> threads = {{.device = "cpu"}, {.shard = 1, .device = "cpu"}};

  EXPECT_FALSE(WaitsForPeers(replicas));
  EXPECT_TRUE(WaitsForPeers(shards));
  EXPECT_FALSE(WaitsForPeers(threads));
}

}  // namespace

}  // namespace logprobd
