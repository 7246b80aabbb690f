#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/tile.h"
#include "kernels/fused/choice.h"
#include "tests/unit/kernels/fused/fused_case.h"

namespace logprobd::testing {
namespace {

using kernels::FusedRaster;
using kernels::FusedTile;

class FusedRankTest : public FusedTest {};

/// Makes a case whose targets include the best id of every third row. The cap makes many logits
/// equal to each other.
FusedCase MakeRankCase(int64_t rows, bool transforms, kernels::Dtype dtype, bool is_f32 = false) {
  FusedCase c = MakeFusedCase({.rows = rows,
                               .hidden = 72,
                               .vocab = 1'500,
                               .logit_stddev = 8,
                               .dtype = dtype,
                               .is_f32 = is_f32});
  if (transforms) {
    c.transform = {.scale = 3.0F, .softcap = 1.0F};
    c.bias.assign(1'500, 0.25F);
  }
  const FusedScores scores = RunFused(c);
  for (size_t row = 0; row < c.targets.size(); row += 3) c.targets[row] = scores.argmax_id[row];
  return c;
}

/// Counts the logits that the kernel computes, one by one, in the tiles of a shard.
std::vector<int32_t> CountsOf(const FusedCase& c, FusedRun& run, const ShardTiles& tiles) {
  FusedRun::Listed all;
  for (int32_t row = 0; row < c.num_rows; ++row) {
    for (int32_t id = 0; id < c.vocab_size; ++id) {
      all.rows.push_back(row);
      all.ids.push_back(id);
    }
  }
  const std::vector<float> logits = run.ListedLogits(all);
  std::vector<int32_t> counts;
  for (int64_t row = 0; row < c.num_rows; ++row) {
    const float* const z = &logits[static_cast<size_t>(row * c.vocab_size)];
    const int32_t target = c.targets[static_cast<size_t>(row)];
    counts.push_back(0);
    for (int32_t id = 0; id < c.vocab_size; ++id) {
      const int64_t tile = id / kernels::kTileColumns;
      if (tile < tiles.begin || tile >= tiles.end) continue;
      counts.back() += kernels::RanksAbove(z[id], id, z[target], target) ? 1 : 0;
    }
  }
  return counts;
}

TEST_F(FusedRankTest, EveryInstanceCountsTheLogitsAboveTheTarget) {
  for (const bool transforms : {false, true}) {
    for (const kernels::Dtype dtype : {kernels::Dtype::kBf16, kernels::Dtype::kF16}) {
      for (const int64_t rows : {1, 70, 300}) {
        const FusedCase c = MakeRankCase(rows, transforms, dtype);
        FusedRun run(c);
        const std::vector<int32_t> expected = CountsOf(c, run, {});
        for (const FusedTile tile : TilesToTest()) {
          EXPECT_EQ(run.RankCounts({}, kernels::FusedChoice{tile, FusedRaster::kAlongVocab, 1}),
                    expected)
              << rows << " rows, transforms " << transforms;
        }
        for (size_t row = 0; row < expected.size(); row += 3) EXPECT_EQ(expected[row], 0);
      }
    }
  }
}

TEST_F(FusedRankTest, EqualLogitsCountIfTheirIdsAreLower) {
  for (const bool transforms : {false, true}) {
    for (const int64_t rows : {70, 300}) {
      FusedCase c = MakeRankCase(rows, transforms, kernels::Dtype::kBf16);
      c.hidden.assign(c.hidden.size(), 0.0F);
      FusedRun run(c);
      for (const FusedTile tile : TilesToTest()) {
        EXPECT_EQ(run.RankCounts({}, kernels::FusedChoice{tile, FusedRaster::kAlongVocab, 1}),
                  c.targets)
            << rows << " rows, transforms " << transforms;
      }
    }
  }
}

TEST_F(FusedRankTest, CountsTheLogitsOfSplitRows) {
  const FusedCase c = MakeRankCase(100, false, kernels::Dtype::kBf16, /*is_f32=*/true);
  FusedRun run(c);

  EXPECT_EQ(run.RankCounts(), CountsOf(c, run, {}));
}

TEST_F(FusedRankTest, AShardCountsItsOwnTiles) {
  const FusedCase c = MakeRankCase(130, true, kernels::Dtype::kBf16);
  FusedRun run(c);
  for (const ShardTiles tiles : {ShardTiles{0, 1}, ShardTiles{1, 5}, ShardTiles{5, 8}}) {
    EXPECT_EQ(run.RankCounts(tiles), CountsOf(c, run, tiles));
  }
}

TEST_F(FusedRankTest, CachingExponentialsDoesNotChangeTheCounts) {
  for (const bool transforms : {false, true}) {
    const FusedCase c = MakeRankCase(130, transforms, kernels::Dtype::kBf16);
    FusedRun run(c);
    const std::vector<int32_t> expected = run.RankCounts();
    const int64_t num_tiles = kernels::NumTiles(c.vocab_size);
    const DeviceArray<__nv_bfloat16> values(std::vector<__nv_bfloat16>(
        static_cast<size_t>(c.num_rows * num_tiles * kernels::kTileColumns)));
    const DeviceArray<int32_t> exponents(
        std::vector<int32_t>(static_cast<size_t>(c.num_rows * num_tiles)));
    const DeviceArray<int32_t> counts(std::vector<int32_t>(expected.size(), 0));
    kernels::FusedPartialsParams params = run.Partials();  // RankCounts left the targets' logits
    params.rank_counts = counts.data();
    params.exponentials = {
        .values = values.data(), .exponents = exponents.data(), .row_tiles = num_tiles};

    ASSERT_EQ(LaunchPartials(params, run.stream()), cudaSuccess);

    ASSERT_EQ(cudaStreamSynchronize(run.stream()), cudaSuccess);
    EXPECT_EQ(counts.Read(), expected);
  }
}

}  // namespace
}  // namespace logprobd::testing
