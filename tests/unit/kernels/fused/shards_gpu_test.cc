#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/tile.h"
#include "kernels/fused/top_k_scratch.h"
#include "tests/unit/kernels/fused/fused_case.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kVocab = 5'000;  // 27 tiles, the last one partly filled
const std::vector<std::vector<ShardTiles>> kCuts = {
    {{0, 27}}, {{0, 14}, {14, 27}}, {{0, 1}, {1, 4}, {4, 5}, {5, 26}, {26, 27}}};

/// Makes a case with a different bias per column, a cap and an entropy temperature.
FusedCase MakeCaseOfEverything(int64_t rows) {
  FusedCase c = MakeFusedCase({.rows = rows, .hidden = 72, .vocab = kVocab});
  c.transform = {.scale = 0.5F, .softcap = 20.0F};
  for (int64_t id = 0; id < kVocab; ++id) c.bias.push_back(static_cast<float>(id % 13) * 0.25F);
  c.entropy_temperatures.assign(static_cast<size_t>(rows), 0.7F);
  return c;
}

void ExpectSameSums(const kernels::TileSums& a, const kernels::TileSums& b) {
  ASSERT_EQ(a.exponent, b.exponent);
  ASSERT_EQ(a.sum, b.sum);
  ASSERT_EQ(a.weighted, b.weighted);
  ASSERT_EQ(a.sum_squares, b.sum_squares);
}

class FusedShardsTest : public FusedTest {};

TEST_F(FusedShardsTest, AShardHasThePartialsOfTheWholeHead) {
  for (const int64_t rows : {1, 70, 300, 600}) {
    const FusedCase c = MakeCaseOfEverything(rows);
    FusedRun run(c);
    const ShardPartials whole = run.PartialsOf({});
    for (const std::vector<ShardTiles>& cut : kCuts) {
      for (const ShardTiles& tiles : cut) {
        SCOPED_TRACE(::testing::Message()
                     << rows << " rows, tiles " << tiles.begin << " to " << tiles.end);

        const ShardPartials shard = run.PartialsOf(tiles);

        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
            const auto of_whole = static_cast<size_t>(whole.layout.At(row, tile));
            const auto of_shard = static_cast<size_t>(shard.layout.At(row, tile - tiles.begin));
            ExpectSameSums(shard.sums[of_shard], whole.sums[of_whole]);
            ExpectSameSums(shard.entropy_sums[of_shard], whole.entropy_sums[of_whole]);
            ASSERT_EQ(shard.tile_max[static_cast<size_t>(row * (tiles.end - tiles.begin) + tile -
                                                         tiles.begin)],
                      whole.tile_max[static_cast<size_t>(row * 27 + tile)]);
          }
        }
      }
    }
  }
}

TEST_F(FusedShardsTest, TargetsAndExtremesOfShardsCombineToThoseOfTheWhole) {
  for (const int64_t rows : {1, 70, 600}) {
    const FusedCase c = MakeCaseOfEverything(rows);
    FusedRun run(c);
    const ShardPartials whole = run.PartialsOf({});
    for (const std::vector<ShardTiles>& cut : kCuts) {
      std::vector<float> target_logits(static_cast<size_t>(rows), kPoison);
      std::vector<uint64_t> max_keys(static_cast<size_t>(rows), 0);
      std::vector<uint32_t> min_keys(static_cast<size_t>(rows), 0);

      for (const ShardTiles& tiles : cut) {
        const ShardPartials shard = run.PartialsOf(tiles);
        for (size_t row = 0; row < target_logits.size(); ++row) {
          const int32_t tile = c.targets[row] / kernels::kTileColumns;
          const bool has_target = tile >= tiles.begin && tile < tiles.end;
          ASSERT_EQ(shard.target_logits[row] != kPoison, has_target);
          if (has_target) target_logits[row] = shard.target_logits[row];
          max_keys[row] = std::max(max_keys[row], shard.max_keys[row]);
          min_keys[row] = std::max(min_keys[row], shard.min_keys[row]);
        }
      }

      EXPECT_EQ(target_logits, whole.target_logits);
      EXPECT_EQ(max_keys, whole.max_keys);
      EXPECT_EQ(min_keys, whole.min_keys);
    }
  }
}

TEST_F(FusedShardsTest, ListsOfShardsMergeToThoseOfTheWhole) {
  for (const int64_t rows : {1, 70, 300}) {
    const FusedCase c = MakeCaseOfEverything(rows);
    FusedRun run(c);
    for (const int32_t top_k : {1, 20, 128}) {
      const auto bytes_of = [&](int64_t num_tiles) {
        return kernels::TopKScratchOf(rows, top_k, num_tiles).size_bytes;
      };
      const std::vector<uint64_t> whole = run.TopK(top_k, bytes_of(27));
      for (const std::vector<ShardTiles>& cut : kCuts) {
        std::vector<std::vector<uint64_t>> lists(static_cast<size_t>(rows));

        for (const ShardTiles& tiles : cut) {
          const std::vector<uint64_t> keys =
              run.TopK(top_k, bytes_of(tiles.end - tiles.begin), tiles);
          for (size_t i = 0; i < keys.size(); ++i) {
            lists[i / static_cast<size_t>(top_k)].push_back(keys[i]);
          }
        }

        for (size_t row = 0; row < lists.size(); ++row) {
          std::sort(lists[row].begin(), lists[row].end(), std::greater<>());
          lists[row].resize(static_cast<size_t>(top_k));
          const auto begin = whole.begin() + static_cast<int64_t>(row) * top_k;
          ASSERT_EQ(lists[row], std::vector<uint64_t>(begin, begin + top_k))
              << "row " << row << " of " << rows << ", k " << top_k << ", " << cut.size()
              << " shards";
        }
      }
    }
  }
}

TEST_F(FusedShardsTest, ListedLogitsOfShardsAreThoseOfTheWhole) {
  const FusedCase c = MakeCaseOfEverything(100);
  FusedRun run(c);
  FusedRun::Listed listed;
  for (int32_t row = 0; row < 100; ++row) {
    for (int32_t id = row; id < kVocab; id += 191) {
      listed.rows.push_back(row);
      listed.ids.push_back(id);
    }
  }
  const std::vector<float> whole = run.ListedLogits(listed);
  for (const std::vector<ShardTiles>& cut : kCuts) {
    std::vector<float> joined(whole.size(), kPoison);

    for (const ShardTiles& tiles : cut) {
      listed.tiles = tiles;
      const std::vector<float> shard = run.ListedLogits(listed);
      for (size_t i = 0; i < shard.size(); ++i) {
        if (shard[i] != kPoison) joined[i] = shard[i];
      }
    }

    EXPECT_EQ(joined, whole) << cut.size() << " shards";
  }
}

}  // namespace
}  // namespace logprobd::testing
