#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/combine/list_scores.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;

struct Lists {
  int64_t num_rows = 0;
  int32_t top_k = 0;
  int32_t num_shards = 0;
  std::vector<uint64_t> keys;  ///< [num_shards, num_rows, top_k]
};

/// Makes distinct keys; a list holds at most `most` keys, followed by empty slots.
Lists MakeLists(int64_t num_rows, int32_t top_k, int32_t num_shards, int32_t most) {
  Lists lists = {num_rows, top_k, num_shards, {}};
  std::mt19937_64 random(static_cast<uint64_t>(num_rows * 7 + top_k * 13 + num_shards));
  std::vector<uint64_t> list(static_cast<size_t>(top_k));
  for (int64_t i = 0; i < num_shards * num_rows; ++i) {
    const auto count = static_cast<size_t>(std::min(most, top_k));
    std::fill(list.begin(), list.end(), 0);
    std::generate_n(list.begin(), count, random);
    std::sort(list.begin(), list.end(), std::greater<>());
    lists.keys.insert(lists.keys.end(), list.begin(), list.end());
  }
  return lists;
}

std::vector<uint64_t> Reference(const Lists& lists) {
  std::vector<uint64_t> merged;
  for (int64_t row = 0; row < lists.num_rows; ++row) {
    std::vector<uint64_t> all;
    for (int64_t shard = 0; shard < lists.num_shards; ++shard) {
      const auto begin = lists.keys.begin() + (shard * lists.num_rows + row) * lists.top_k;
      all.insert(all.end(), begin, begin + lists.top_k);
    }
    std::sort(all.begin(), all.end(), std::greater<>());
    merged.insert(merged.end(), all.begin(), all.begin() + lists.top_k);
  }
  return merged;
}

std::vector<uint64_t> Merge(const Lists& lists) {
  const DeviceArray<uint64_t> gathered(lists.keys);
  const DeviceArray<uint64_t> keys(
      std::vector<uint64_t>(static_cast<size_t>(lists.num_rows * lists.top_k), 77));
  EXPECT_EQ(LaunchMergeTopK({.num_rows = lists.num_rows,
                             .top_k = lists.top_k,
                             .num_shards = lists.num_shards,
                             .gathered = gathered.data(),
                             .keys = keys.data()},
                            nullptr),
            cudaSuccess);
  return keys.Read();
}

class MergeTopKTest : public testing::GpuTest {};

TEST_F(MergeTopKTest, KeepsTheLargestOfAllShardsInOrder) {
  for (const int64_t rows : {1, 7, 1'000}) {
    for (const int32_t top_k : {1, 2, 20, 127, 128}) {
      for (const int32_t shards : {1, 2, 3, 8, 16}) {
        SCOPED_TRACE(::testing::Message()
                     << rows << " rows, k " << top_k << ", " << shards << " shards");
        const Lists lists = MakeLists(rows, top_k, shards, top_k);

        const std::vector<uint64_t> merged = Merge(lists);

        ASSERT_EQ(merged, Reference(lists));
      }
    }
  }
}

TEST_F(MergeTopKTest, EmptySlotsComeLast) {
  for (const int32_t most : {0, 1, 6}) {
    for (const int32_t shards : {2, 3, 16}) {
      const Lists lists = MakeLists(50, 20, shards, most);

      const std::vector<uint64_t> merged = Merge(lists);

      EXPECT_EQ(merged, Reference(lists)) << most << " keys on each of " << shards << " shards";
    }
  }
}

TEST_F(MergeTopKTest, OneShardCanHoldTheWholeList) {
  Lists lists = MakeLists(3, 128, 4, 128);
  for (size_t i = 0; i < lists.keys.size(); ++i) {
    const bool is_best_shard = i / (3 * 128) == 2;
    lists.keys[i] = lists.keys[i] >> 1 | (is_best_shard ? uint64_t{1} << 63 : 0);
  }

  const std::vector<uint64_t> merged = Merge(lists);

  EXPECT_EQ(merged, std::vector<uint64_t>(lists.keys.begin() + 2 * 3 * 128,
                                          lists.keys.begin() + 3 * 3 * 128));
}

TEST_F(MergeTopKTest, RefusesBrokenBounds) {
  const DeviceArray<uint64_t> memory(std::vector<uint64_t>(1'024));
  const MergeTopKParams good = {.num_rows = 1,
                                .top_k = 5,
                                .num_shards = 2,
                                .gathered = memory.data(),
                                .keys = memory.data() + 512};
  const auto launch_with = [&](const auto& change) {
    MergeTopKParams params = good;
    change(params);
    return LaunchMergeTopK(params, nullptr);
  };
  using Params = MergeTopKParams;
  EXPECT_EQ(launch_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(launch_with([](Params& p) { p.num_rows = 0; }), cudaSuccess);
  EXPECT_EQ(launch_with([](Params& p) { p.num_rows = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.top_k = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.top_k = 129; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.num_shards = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.num_shards = 17; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.gathered = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.keys = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::kernels
