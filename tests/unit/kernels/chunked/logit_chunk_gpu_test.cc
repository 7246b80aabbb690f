#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/chunked/logit_chunk.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/tile.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
/// Tolerance of a tile's sum. The kernel adds 192 fp32 terms in chains of 24, followed by 4 joins;
/// each term is at most 1 and has an error of 2 ulp.
constexpr double kSumTolerance = 192 * 4 * 1.2e-7;
/// Tolerance of a tile's weighted sum. The magnitude of a term is at most 0.53 (at y - k = -1.44),
/// and the term inherits the error of y - k, which is |y| * 2^-24.
constexpr double kWeightedTolerance = 2 * kSumTolerance;

struct StatsOutput {
  std::vector<TileSums> sums;
  std::vector<TileSums> entropy_sums;
  std::vector<uint64_t> max_keys;
  std::vector<uint32_t> min_keys;
  std::vector<float> target_logits;
};

/// Logits [num_rows, num_tiles * 192]; columns beyond vocab_size are poison.
struct StatsCase {
  int64_t num_rows = 3;
  int64_t vocab_size = 192;
  std::vector<float> logits;
  std::vector<float> log2_scales;
  std::vector<int32_t> targets;
  LogitTransform transform;
  std::vector<float> bias;
  int64_t shard_begin = 0;  ///< First tile of the shard.

  int64_t num_tiles() const { return NumTiles(vocab_size); }
  int64_t stride() const { return num_tiles() * kTileColumns; }
  PartialLayout layout() const { return PartialLayoutOf(num_rows, num_tiles() - shard_begin); }
};

StatsCase MakeCase(int64_t num_rows, int64_t vocab_size, float stddev) {
  StatsCase c;
  c.num_rows = num_rows;
  c.vocab_size = vocab_size;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0F, stddev);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t column = 0; column < c.stride(); ++column) {
      c.logits.push_back(column < vocab_size ? normal(random)
                                             : std::numeric_limits<float>::quiet_NaN());
    }
    c.log2_scales.push_back(Log2Scale(0.5F + static_cast<float>(row)));
    c.targets.push_back(static_cast<int32_t>((row * 97 + vocab_size - 1) % vocab_size));
  }
  return c;
}

StatsOutput RunStats(const StatsCase& c, bool extremes, bool squares, bool entropy,
                     int64_t launch_tiles) {
  const auto num_partials = static_cast<size_t>(c.num_rows * (c.num_tiles() - c.shard_begin));
  const DeviceArray<float> logits(c.logits);
  const DeviceArray<float> scales(c.log2_scales);
  const DeviceArray<int32_t> targets(c.targets);
  std::vector<float> bias = c.bias;
  bias.resize(static_cast<size_t>(c.stride()));
  const DeviceArray<float> bias_array(bias);
  const DeviceArray<TileSums> sums(std::vector<TileSums>(num_partials, {77, 7, 7, 7}));
  const DeviceArray<TileSums> entropy_sums(std::vector<TileSums>(num_partials, {77, 7, 7, 7}));
  const DeviceArray<uint64_t> max_keys(std::vector<uint64_t>(static_cast<size_t>(c.num_rows), 0));
  const DeviceArray<uint32_t> min_keys(std::vector<uint32_t>(static_cast<size_t>(c.num_rows), 0));
  const DeviceArray<float> target_logits(
      std::vector<float>(static_cast<size_t>(c.num_rows), -777.0F));
  for (int64_t tile = c.shard_begin; tile < c.num_tiles(); tile += launch_tiles) {
    TileStatsParams params;
    params.chunk.dots = logits.data() + tile * kTileColumns;
    params.chunk.row_stride = c.stride();
    params.chunk.num_rows = c.num_rows;
    params.chunk.tile_begin = tile;
    params.chunk.num_tiles = std::min(launch_tiles, c.num_tiles() - tile);
    params.chunk.vocab_size = c.vocab_size;
    params.chunk.transform = c.transform;
    params.chunk.bias = c.bias.empty() ? nullptr : bias_array.data();
    params.log2_scales = scales.data();
    params.targets = targets.data();
    params.tile_origin = c.shard_begin;
    params.layout = c.layout();
    params.target_logits = target_logits.data();
    params.sums = sums.data();
    params.wants_sum_squares = squares;
    if (extremes) {
      params.max_keys = max_keys.data();
      params.min_keys = min_keys.data();
    }
    if (entropy) {
      params.entropy_sums = entropy_sums.data();
      params.entropy_log2_scales = scales.data();
    }
    EXPECT_EQ(LaunchTileStats(params, nullptr), cudaSuccess);
  }
  return {sums.Read(), entropy_sums.Read(), max_keys.Read(), min_keys.Read(), target_logits.Read()};
}

void ExpectMatchesReference(const StatsCase& c, const StatsOutput& output) {
  for (int64_t row = 0; row < c.num_rows; ++row) {
    const double scale = c.log2_scales[static_cast<size_t>(row)];
    const float* logits = c.logits.data() + row * c.stride();
    for (int64_t tile = 0; tile < c.num_tiles(); ++tile) {
      SCOPED_TRACE(::testing::Message() << "row " << row << " tile " << tile);
      const int64_t begin = tile * kTileColumns;
      const int64_t end = std::min(begin + kTileColumns, c.vocab_size);
      const float* const best = std::max_element(logits + begin, logits + end);
      const int32_t k = TileExponent(*best, static_cast<float>(scale));
      double sum = 0;
      double weighted = 0;
      double squares = 0;
      for (int64_t column = begin; column < end; ++column) {
        const double shifted = logits[column] * scale - k;
        const double power = std::exp2(shifted);
        sum += power;
        if (power > 0) weighted += shifted * power;
        squares += power * power;
      }
      const auto index = static_cast<size_t>(c.layout().At(row, tile));
      const TileSums& sums = output.sums[index];
      ASSERT_EQ(sums.exponent, k);
      ASSERT_NEAR(sums.sum, sum, kSumTolerance);
      ASSERT_NEAR(sums.weighted, weighted, kWeightedTolerance);
      ASSERT_NEAR(sums.sum_squares, squares, kSumTolerance);
    }
    const auto i = static_cast<size_t>(row);
    EXPECT_EQ(output.target_logits[i], logits[c.targets[i]]);
    const float* const best = std::max_element(logits, logits + c.vocab_size);
    EXPECT_EQ(output.max_keys[i], LogitKey(*best, static_cast<int32_t>(best - logits)));
    EXPECT_EQ(output.min_keys[i], ~OrderedBits(*std::min_element(logits, logits + c.vocab_size)));
  }
}

class TileStatsTest : public testing::GpuTest {};

TEST_F(TileStatsTest, MatchesTheDoubleReferenceAtTileAndWarpEdges) {
  for (const int64_t vocab_size : {1, 3, 4, 31, 32, 33, 191, 192, 193, 768, 769, 6'145}) {
    for (const float stddev : {0.01F, 3.0F, 20.0F}) {
      SCOPED_TRACE(::testing::Message() << vocab_size << " columns, deviation " << stddev);
      const StatsCase c = MakeCase(5, vocab_size, stddev);
      ExpectMatchesReference(c, RunStats(c, true, true, true, c.num_tiles()));
    }
  }
}

TEST_F(TileStatsTest, TheCutIntoChunksDoesNotChangeTheBits) {
  const StatsCase c = MakeCase(7, 5'000, 3.0F);
  const StatsOutput whole = RunStats(c, true, true, true, c.num_tiles());
  for (const int64_t tiles : {1, 3, 4, 5, 26}) {
    const StatsOutput cut = RunStats(c, true, true, true, tiles);
    for (size_t i = 0; i < whole.sums.size(); ++i) {
      ASSERT_EQ(cut.sums[i].sum, whole.sums[i].sum);
      ASSERT_EQ(cut.sums[i].weighted, whole.sums[i].weighted);
    }
    ASSERT_EQ(cut.max_keys, whole.max_keys);
    ASSERT_EQ(cut.target_logits, whole.target_logits);
  }
}

TEST_F(TileStatsTest, PartialsOfAShardStartWithItsFirstTile) {
  for (const int64_t num_rows : {7, 600}) {  // row-major and tile-major partials
    const StatsCase c = MakeCase(num_rows, 5'000, 3.0F);
    const StatsOutput whole = RunStats(c, true, true, true, c.num_tiles());
    for (const int64_t begin : {1, 13, 26}) {
      StatsCase shard = c;
      shard.shard_begin = begin;

      const StatsOutput output = RunStats(shard, true, true, true, 5);

      ASSERT_EQ(output.sums.size(), static_cast<size_t>(num_rows * (c.num_tiles() - begin)));
      for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t tile = begin; tile < c.num_tiles(); ++tile) {
          const auto of_whole = static_cast<size_t>(c.layout().At(row, tile));
          const auto of_shard = static_cast<size_t>(shard.layout().At(row, tile - begin));
          ASSERT_EQ(output.sums[of_shard].exponent, whole.sums[of_whole].exponent);
          ASSERT_EQ(output.sums[of_shard].sum, whole.sums[of_whole].sum);
          ASSERT_EQ(output.sums[of_shard].weighted, whole.sums[of_whole].weighted);
          ASSERT_EQ(output.sums[of_shard].sum_squares, whole.sums[of_whole].sum_squares);
          ASSERT_EQ(output.entropy_sums[of_shard].weighted, whole.entropy_sums[of_whole].weighted);
        }
        const auto i = static_cast<size_t>(row);
        const bool has_target = c.targets[i] >= begin * kTileColumns;
        ASSERT_EQ(output.target_logits[i], has_target ? whole.target_logits[i] : -777.0F);
      }
    }
  }
}

TEST_F(TileStatsTest, OtherOutputsDoNotChangeTheBits) {
  for (const bool has_transform : {false, true}) {
    StatsCase c = MakeCase(7, 5'000, 3.0F);
    if (has_transform) {
      c.transform = {.scale = 0.125F, .softcap = 30.0F};
      c.bias.assign(5'000, 0.5F);
    }
    const StatsOutput all = RunStats(c, true, true, true, c.num_tiles());
    for (int flags = 0; flags < 7; ++flags) {
      const StatsOutput some =
          RunStats(c, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, c.num_tiles());
      for (size_t i = 0; i < all.sums.size(); ++i) {
        ASSERT_EQ(some.sums[i].exponent, all.sums[i].exponent);
        ASSERT_EQ(some.sums[i].sum, all.sums[i].sum);
        ASSERT_EQ(some.sums[i].weighted, all.sums[i].weighted);
        ASSERT_EQ(all.entropy_sums[i].weighted, all.sums[i].weighted);
      }
      ASSERT_EQ(some.target_logits, all.target_logits);
    }
  }
}

TEST_F(TileStatsTest, RankCountsAreThoseOfLogitsAboveTheTarget) {
  for (const int64_t launch_tiles : {1, 4, 27}) {
    StatsCase c = MakeCase(9, 5'000, 3.0F);
    for (float& z : c.logits) z = std::round(4.0F * z) / 4.0F;  // many equal logits
    std::vector<float> target_logits;
    std::vector<int32_t> expected;
    for (int64_t row = 0; row < c.num_rows; ++row) {
      const float* const z = &c.logits[static_cast<size_t>(row * c.stride())];
      const int32_t target = c.targets[static_cast<size_t>(row)];
      target_logits.push_back(z[target]);
      expected.push_back(0);
      for (int32_t id = 0; id < c.vocab_size; ++id) {
        expected.back() += RanksAbove(z[id], id, z[target], target) ? 1 : 0;
      }
    }
    const DeviceArray<float> logits(c.logits);
    const DeviceArray<float> scales(c.log2_scales);
    const DeviceArray<int32_t> targets(c.targets);
    const DeviceArray<float> known_logits(target_logits);
    const DeviceArray<TileSums> sums(
        std::vector<TileSums>(static_cast<size_t>(c.num_rows * c.num_tiles())));
    const DeviceArray<int32_t> counts(std::vector<int32_t>(expected.size(), 0));

    for (int64_t tile = 0; tile < c.num_tiles(); tile += launch_tiles) {
      TileStatsParams params;
      params.chunk.dots = logits.data() + tile * kTileColumns;
      params.chunk.row_stride = c.stride();
      params.chunk.num_rows = c.num_rows;
      params.chunk.tile_begin = tile;
      params.chunk.num_tiles = std::min(launch_tiles, c.num_tiles() - tile);
      params.chunk.vocab_size = c.vocab_size;
      params.log2_scales = scales.data();
      params.targets = targets.data();
      params.layout = c.layout();
      params.sums = sums.data();
      params.target_logits = known_logits.data();
      params.rank_counts = counts.data();
      ASSERT_EQ(LaunchTileStats(params, nullptr), cudaSuccess);
    }

    EXPECT_EQ(counts.Read(), expected) << launch_tiles << " tiles per chunk";
    EXPECT_EQ(known_logits.Read(), target_logits);
  }
}

TEST_F(TileStatsTest, TargetLogitsAreTheDiagonalOfTheGatheredProduct) {
  constexpr int64_t kHidden = 8;
  std::vector<float> weight;  // rows of ids 192 to 391, each with its id in every element
  for (int32_t id = 192; id < 392; ++id)
    weight.insert(weight.end(), kHidden, static_cast<float>(id));
  const DeviceArray<float> weight_array(weight);
  const DeviceArray<int32_t> targets(std::vector<int32_t>{391, 192, 191, 250, 392});
  const DeviceArray<float> gathered(std::vector<float>(5 * kHidden, -777.0F));
  const ShardTargets shard = {
      .targets = targets.data(), .num_rows = 5, .column_begin = 192, .column_end = 392};

  ASSERT_EQ(LaunchGatherWeight(shard, weight_array.data(), kHidden * sizeof(float), gathered.data(),
                               nullptr),
            cudaSuccess);

  const std::vector<float> rows = gathered.Read();
  for (const auto& [row, id] : {std::pair{0, 391}, {1, 192}, {3, 250}}) {
    for (int64_t k = 0; k < kHidden; ++k) {
      EXPECT_EQ(rows[static_cast<size_t>(row * kHidden + k)], static_cast<float>(id));
    }
  }
  std::vector<float> dots(5 * 6, 0.0F);
  for (size_t row = 0; row < 5; ++row) dots[row * 6 + row] = static_cast<float>(row) + 1.0F;
  std::vector<float> bias(392, 0.0F);
  bias[250] = 100.0F;
  const DeviceArray<float> dot_array(dots);
  const DeviceArray<float> bias_array(bias);
  const DeviceArray<float> logits(std::vector<float>(5, -777.0F));

  ASSERT_EQ(LaunchTargetLogits({.targets = shard,
                                .dots = dot_array.data(),
                                .row_stride = 6,
                                .transform = {.scale = 2.0F},
                                .bias = bias_array.data(),
                                .logits = logits.data()},
                               nullptr),
            cudaSuccess);

  EXPECT_EQ(logits.Read(), (std::vector<float>{2.0F, 4.0F, -777.0F, 108.0F, -777.0F}));
}

TEST_F(TileStatsTest, NegativeInfinityAddsNothing) {
  StatsCase c = MakeCase(2, 400, 3.0F);
  for (int64_t column = 0; column < 400; column += 2) {
    c.logits[static_cast<size_t>(column)] = -kInfinity;
    c.logits[static_cast<size_t>(c.stride() + column)] = -kInfinity;
  }
  c.targets = {1, 399};

  ExpectMatchesReference(c, RunStats(c, true, true, false, 3));
}

TEST_F(TileStatsTest, ATileOfNegativeInfinityIsEmpty) {
  StatsCase c = MakeCase(1, 384, 3.0F);
  std::fill_n(c.logits.begin(), 192, -kInfinity);

  const StatsOutput output = RunStats(c, true, true, false, 2);

  EXPECT_EQ(output.sums[0].exponent, kEmptyExponent);
  EXPECT_EQ(output.sums[0].sum, 0.0F);
  EXPECT_NE(output.sums[1].exponent, kEmptyExponent);
}

TEST_F(TileStatsTest, NanAndInfinityMarkOnlyTheirTile) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity}) {
    for (const size_t column : {0U, 5U, 100U, 191U}) {
      StatsCase c = MakeCase(1, 576, 3.0F);
      c.logits[192 + column] = bad;

      const StatsOutput output = RunStats(c, true, true, false, 3);

      EXPECT_EQ(output.sums[1].exponent, kNonfiniteExponent) << bad << " at " << column;
      EXPECT_LT(std::abs(output.sums[0].exponent), 100);
      EXPECT_LT(std::abs(output.sums[2].exponent), 100);
    }
  }
}

TEST_F(TileStatsTest, RefusesBrokenBounds) {
  const DeviceArray<float> memory(std::vector<float>(4'096));
  TileStatsParams good;
  good.chunk.dots = memory.data();
  good.chunk.row_stride = 192;
  good.chunk.num_rows = 1;
  good.chunk.tile_begin = 3;
  good.chunk.num_tiles = 1;
  good.chunk.vocab_size = 768;
  good.log2_scales = memory.data();
  good.targets = reinterpret_cast<const int32_t*>(memory.data());
  good.tile_origin = 3;
  good.layout = {.row_stride = 1, .tile_stride = 1};
  good.sums = reinterpret_cast<TileSums*>(memory.data() + 1'024);
  good.target_logits = memory.data() + 2'048;
  const auto launch_with = [&](const auto& change) {
    TileStatsParams params = good;
    change(params);
    return LaunchTileStats(params, nullptr);
  };
  using Params = TileStatsParams;
  EXPECT_EQ(LaunchTileStats({}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(launch_with([](Params& p) { p.tile_origin = 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.tile_origin = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

std::vector<uint64_t> TopKReference(const std::vector<float>& row, int32_t top_k) {
  std::vector<uint64_t> keys;
  for (size_t id = 0; id < row.size(); ++id) {
    keys.push_back(LogitKey(row[id], static_cast<int32_t>(id)));
  }
  keys.resize(std::max(keys.size(), static_cast<size_t>(top_k)));
  std::partial_sort(keys.begin(), keys.begin() + top_k, keys.end(), std::greater<>());
  keys.resize(static_cast<size_t>(top_k));
  return keys;
}

/// Computes the top-k of rows of equal width, in chunks of `chunk_tiles` tiles.
std::vector<uint64_t> RunTopK(const std::vector<std::vector<float>>& rows, int32_t top_k,
                              int64_t chunk_tiles) {
  const auto vocab_size = static_cast<int64_t>(rows[0].size());
  const int64_t num_tiles = NumTiles(vocab_size);
  std::vector<float> padded;
  for (const std::vector<float>& row : rows) {
    padded.insert(padded.end(), row.begin(), row.end());
    padded.resize(padded.size() + static_cast<size_t>(num_tiles * kTileColumns - vocab_size),
                  1e30F);
  }
  const DeviceArray<float> logits(padded);
  const DeviceArray<uint64_t> keys(
      std::vector<uint64_t>(rows.size() * static_cast<size_t>(top_k), 0));
  for (int64_t tile = 0; tile < num_tiles; tile += chunk_tiles) {
    TopKParams params;
    params.chunk.dots = logits.data() + tile * kTileColumns;
    params.chunk.row_stride = num_tiles * kTileColumns;
    params.chunk.num_rows = static_cast<int64_t>(rows.size());
    params.chunk.tile_begin = tile;
    params.chunk.num_tiles = std::min(chunk_tiles, num_tiles - tile);
    params.chunk.vocab_size = vocab_size;
    params.top_k = top_k;
    params.keys = keys.data();
    EXPECT_EQ(LaunchTopK(params, nullptr), cudaSuccess);
  }
  return keys.Read();
}

class TopKTest : public testing::GpuTest {
 protected:
  static void ExpectRight(const std::vector<std::vector<float>>& rows) {
    for (const int32_t top_k : {1, 2, 20, 127, 128}) {
      for (const int64_t tiles : {1, 7, 1000}) {
        SCOPED_TRACE(::testing::Message() << "k " << top_k << ", tiles " << tiles);
        const std::vector<uint64_t> keys = RunTopK(rows, top_k, tiles);
        for (size_t row = 0; row < rows.size(); ++row) {
          const auto begin = keys.begin() + static_cast<int64_t>(row) * top_k;
          ASSERT_EQ(std::vector<uint64_t>(begin, begin + top_k), TopKReference(rows[row], top_k));
        }
      }
    }
  }
};

TEST_F(TopKTest, FindsTheBestOfRandomRows) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  for (const size_t vocab_size : {1U, 100U, 192U, 1'023U, 1'024U, 1'025U, 10'007U}) {
    std::vector<std::vector<float>> rows(4, std::vector<float>(vocab_size));
    for (auto& row : rows) std::generate(row.begin(), row.end(), [&] { return normal(random); });
    ExpectRight(rows);
  }
}

TEST_F(TopKTest, FindsTheBestOfRisingAndFallingRows) {
  std::vector<float> rising(9'001);
  std::iota(rising.begin(), rising.end(), -4'000.0F);
  const std::vector<float> falling(rising.rbegin(), rising.rend());
  ExpectRight({rising, falling});
}

TEST_F(TopKTest, EqualLogitsKeepTheLowestIds) {
  std::vector<float> flat(5'000, 0.25F);
  std::vector<float> zeros(5'000, 0.0F);
  for (size_t i = 0; i < zeros.size(); i += 3) zeros[i] = -0.0F;
  ExpectRight({flat, zeros});
}

}  // namespace
}  // namespace logprobd::kernels
