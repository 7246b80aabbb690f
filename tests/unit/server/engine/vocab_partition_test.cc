#include "server/engine/vocab_partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/common/tile.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> Sizes(int64_t vocab_size, int32_t num_shards) {
  const auto ranges = PartitionTiles(vocab_size, num_shards);
  EXPECT_TRUE(ranges.ok()) << ranges.status();
  std::vector<int64_t> sizes;
  if (ranges.ok()) {
    for (const TileRange& range : *ranges) sizes.push_back(range.size());
  }
  return sizes;
}

TEST(VocabPartitionTest, GivesTheLongerRunsToTheFirstShards) {
  EXPECT_THAT(Sizes(151'936, 4), ElementsAre(198, 198, 198, 198));
  EXPECT_THAT(Sizes(10 * kernels::kTileColumns, 4), ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(Sizes(4 * kernels::kTileColumns, 4), ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(Sizes(1, 1), ElementsAre(1));
}

TEST(VocabPartitionTest, CoversEveryTileOnce) {
  for (const int64_t vocab_size : {1, 191, 192, 193, 1'003, 32'000, 151'669, 262'144}) {
    const int64_t num_tiles = kernels::NumTiles(vocab_size);
    for (int32_t num_shards = 1; num_shards <= num_tiles && num_shards <= 9; ++num_shards) {
      const auto ranges = PartitionTiles(vocab_size, num_shards);

      ASSERT_TRUE(ranges.ok()) << ranges.status();
      ASSERT_EQ(ranges->size(), static_cast<size_t>(num_shards));
      int64_t end = 0;
      for (const TileRange& range : *ranges) {
        EXPECT_EQ(range.begin, end);
        EXPECT_GE(range.size(), 1);
        end = range.end;
      }
      EXPECT_EQ(end, num_tiles) << vocab_size << " over " << num_shards;
    }
  }
}

TEST(VocabPartitionTest, NamesTheLargestNumberOfShards) {
  const auto too_many = PartitionTiles(1'003, 7);

  EXPECT_EQ(too_many.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(too_many.status().message()),
      HasSubstr("7 shards cannot share a vocabulary of 1003: it has 6 tiles of 192 columns, "
                "so at most 6 shards"));
  for (const int32_t num_shards : {0, -1}) {
    EXPECT_EQ(PartitionTiles(1'003, num_shards).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace logprobd
