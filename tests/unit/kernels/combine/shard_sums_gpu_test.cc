#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/combine/row_scores.h"
#include "kernels/combine/shard_sums.h"
#include "kernels/common/logit_key.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/combine/partials_case.h"

namespace logprobd::kernels {
namespace {

using namespace partials_case;  // NOLINT: helpers of these tests
using logprobd::testing::DeviceArray;

/// Outputs of one step of one shard.
struct ShardStep {
  std::vector<int32_t> exponents;
  std::vector<int64_t> row_sums;
};

/// Which of several shards has the targets of which rows: row r's is in shard r % num_shards.
struct TargetOwner {
  size_t shard;
  size_t num_shards;
};

int64_t NumFields(const Ask& ask, bool has_targets) {
  return NumSumFields(ask.squares, ask.entropy_sums) + (has_targets ? 2 : 0);
}

/// Runs a step of the shard with tiles [begin, end): LaunchShardExponents if `row_exponents` is
/// null, else LaunchShardSums, with the targets if there is an `owner`.
ShardStep RunShard(const PartialsCase& c, const Ask& ask, int64_t begin, int64_t end,
                   const std::vector<int32_t>* row_exponents, const TargetOwner* owner = nullptr) {
  const int64_t num_rows = c.num_rows;
  std::vector<int32_t> columns(c.target_logits.size(), 3);
  std::vector<float> logits = c.target_logits;
  for (size_t row = 0; owner != nullptr && row < columns.size(); ++row) {
    if (row % owner->num_shards == owner->shard) continue;
    columns[row] = -1;
    logits[row] = -77.0F;  // Not read.
  }
  const DeviceArray<int32_t> target_columns(columns);
  const DeviceArray<float> target_logits(logits);
  const DeviceArray<TileSums> sums(ShardOf(c, c.sums, begin, end));
  const DeviceArray<TileSums> entropy_sums(ShardOf(c, c.entropy_sums, begin, end));
  const auto num_exponents = static_cast<size_t>(NumSumSets(ask.entropy_sums) * num_rows);
  const DeviceArray<int32_t> exponents(
      row_exponents == nullptr ? std::vector<int32_t>(num_exponents, -77) : *row_exponents);
  const DeviceArray<int64_t> row_sums(
      std::vector<int64_t>(static_cast<size_t>(NumFields(ask, owner != nullptr) * num_rows), -77));
  ShardSumsParams params;
  params.num_rows = num_rows;
  params.num_tiles = end - begin;
  params.layout = PartialLayoutOf(num_rows, end - begin);
  params.sums = sums.data();
  if (ask.entropy_sums) params.entropy_sums = entropy_sums.data();
  params.wants_sum_squares = ask.squares;
  params.exponents = exponents.data();
  if (owner != nullptr) {
    params.target_columns = target_columns.data();
    params.target_logits = target_logits.data();
  }
  params.row_sums = row_sums.data();
  EXPECT_EQ(row_exponents == nullptr ? LaunchShardExponents(params, nullptr)
                                     : LaunchShardSums(params, nullptr),
            cudaSuccess);
  return {exponents.Read(), row_sums.Read()};
}

/// Computes scores shard by shard, with reductions on the host. With `exchanges_targets` each shard
/// knows only the logits of its own targets.
Outputs ScoreShards(const PartialsCase& c, const Ask& ask, const std::vector<int64_t>& cuts,
                    bool exchanges_targets = false) {
  std::vector<int32_t> exponents(static_cast<size_t>(NumSumSets(ask.entropy_sums) * c.num_rows),
                                 kEmptyExponent);
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const ShardStep step = RunShard(c, ask, cuts[i], cuts[i + 1], nullptr);
    for (size_t j = 0; j < exponents.size(); ++j) {
      exponents[j] = std::max(exponents[j], step.exponents[j]);
    }
  }
  const int64_t num_fields = NumFields(ask, exchanges_targets);
  std::vector<int64_t> row_sums(static_cast<size_t>(num_fields * c.num_rows), 0);
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const TargetOwner owner = {i, cuts.size() - 1};
    const ShardStep step =
        RunShard(c, ask, cuts[i], cuts[i + 1], &exponents, exchanges_targets ? &owner : nullptr);
    for (size_t j = 0; j < row_sums.size(); ++j) row_sums[j] += step.row_sums[j];
  }
  const ScoresRun run(c);
  const DeviceArray<int32_t> exponents_array(exponents);
  const DeviceArray<int64_t> row_sums_array(row_sums);
  const DeviceArray<float> target_logits(std::vector<float>(c.target_logits.size(), -77.0F));
  ShardScoresParams params;
  params.scores = run.Params(ask);
  params.has_sum_squares = ask.squares;
  params.has_entropy_sums = ask.entropy_sums;
  params.exponents = exponents_array.data();
  params.row_sums = row_sums_array.data();
  if (exchanges_targets) {
    params.scores.target_logits = params.target_logits = target_logits.data();
    for (size_t i = row_sums.size() - c.target_logits.size(); i < row_sums.size(); ++i) {
      EXPECT_EQ(row_sums[i], 1) << "shards that have the target";
    }
  }
  EXPECT_EQ(LaunchShardScores(params, nullptr), cudaSuccess);
  return run.Read();
}

class ShardSumsTest : public testing::GpuTest {};

TEST_F(ShardSumsTest, AnyCutIntoShardsGivesTheBitsOfRowScores) {
  for (const int64_t rows : {1, 7, 512, 513, 4'100}) {
    const PartialsCase c = MakeCase(rows);
    const Outputs whole = ScoreWhole(c, {});
    for (const std::vector<int64_t>& cuts : kCuts) {
      SCOPED_TRACE(::testing::Message() << rows << " rows, " << cuts.size() - 1 << " shards");

      const Outputs shards = ScoreShards(c, {}, cuts);

      ExpectSameBits(shards, whole);
    }
  }
}

TEST_F(ShardSumsTest, OutputsThatAreNotRequestedAreNotWrittenAndChangeNoBits) {
  for (const int64_t rows : {7, 600}) {
    const PartialsCase c = MakeCase(rows);
    for (const Ask ask : {Ask{true, false}, Ask{false, true}, Ask{false, false}}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows, squares " << ask.squares
                                        << ", own entropy temperature " << ask.entropy_sums);
      const Outputs whole = ScoreWhole(c, ask);

      const Outputs shards = ScoreShards(c, ask, {0, 3, 4, 29});

      ExpectSameBits(shards, whole);
    }
  }
}

TEST_F(ShardSumsTest, ShardsThatKnowTheirOwnTargetsGiveTheBitsOfRowScores) {
  for (const int64_t rows : {7, 600}) {
    const PartialsCase c = MakeCase(rows);
    for (const Ask ask : {Ask{true, true}, Ask{true, false}, Ask{false, true}}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows, squares " << ask.squares
                                        << ", own entropy temperature " << ask.entropy_sums);
      const Outputs whole = ScoreWhole(c, ask);

      const Outputs shards = ScoreShards(c, ask, {0, 3, 4, 29}, /*exchanges_targets=*/true);

      ExpectSameBits(shards, whole);
    }
  }
}

TEST_F(ShardSumsTest, AShardWithoutTilesAddsNothing) {
  for (const int64_t rows : {7, 600}) {
    const PartialsCase c = MakeCase(rows);

    const Outputs shards = ScoreShards(c, {}, {0, 0, 29});

    ExpectSameBits(shards, ScoreWhole(c, {}));
  }
}

TEST_F(ShardSumsTest, RowsThatAreNonfiniteOnOneShardAreNonfinite) {
  const PartialsCase c = MakeCase(600);

  const Outputs shards = ScoreShards(c, {}, {0, 10, 29});

  for (size_t row = 0; row < shards.nonfinite.size(); ++row) {
    const bool is_bad = row % 6 == 3 || row % 6 == 4;
    ASSERT_EQ(shards.nonfinite[row], is_bad ? 1 : 0) << "row " << row;
    ASSERT_EQ(shards.argmax_id[row] == -1, is_bad) << "row " << row;
  }
}

TEST_F(ShardSumsTest, TheLayoutOfPartialsDoesNotChangeTheBits) {
  for (const int64_t rows : {7, 600}) {
    const PartialsCase c = MakeCase(rows);
    std::vector<TileSums> by_tile(c.sums.size());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t tile = 0; tile < kTiles; ++tile) {
        by_tile[static_cast<size_t>(tile * rows + row)] =
            c.sums[static_cast<size_t>(row * kTiles + tile)];
      }
    }
    const auto exponents_of = [&](const std::vector<TileSums>& sums, const PartialLayout& layout) {
      const DeviceArray<TileSums> array(sums);
      const DeviceArray<int32_t> exponents(std::vector<int32_t>(static_cast<size_t>(rows), -77));
      EXPECT_EQ(LaunchShardExponents({.num_rows = rows,
                                      .num_tiles = kTiles,
                                      .layout = layout,
                                      .sums = array.data(),
                                      .exponents = exponents.data()},
                                     nullptr),
                cudaSuccess);
      return exponents.Read();
    };

    EXPECT_EQ(exponents_of(by_tile, {.row_stride = 1, .tile_stride = rows}),
              exponents_of(c.sums, {.row_stride = kTiles, .tile_stride = 1}));
  }
}

TEST_F(ShardSumsTest, RefusesBrokenBounds) {
  const DeviceArray<uint64_t> memory(std::vector<uint64_t>(1'024));
  ShardSumsParams good;
  good.num_rows = 1;
  good.num_tiles = 2;
  good.layout = PartialLayoutOf(1, 2);
  good.sums = reinterpret_cast<const TileSums*>(memory.data());
  good.exponents = reinterpret_cast<int32_t*>(memory.data() + 128);
  good.row_sums = reinterpret_cast<int64_t*>(memory.data() + 256);
  const auto sums_with = [&](const auto& change) {
    ShardSumsParams params = good;
    change(params);
    return LaunchShardSums(params, nullptr);
  };
  using Params = ShardSumsParams;
  EXPECT_EQ(sums_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(sums_with([](Params& p) { p.num_rows = 0; }), cudaSuccess);
  EXPECT_EQ(sums_with([](Params& p) { p.num_rows = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(sums_with([](Params& p) { p.num_tiles = 0; }), cudaSuccess);
  EXPECT_EQ(sums_with([](Params& p) { p.num_tiles = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(sums_with([](Params& p) { p.sums = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(sums_with([](Params& p) { p.target_columns = p.exponents; }), cudaErrorInvalidValue);
  EXPECT_EQ(sums_with([](Params& p) { p.exponents = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(sums_with([](Params& p) { p.row_sums = nullptr; }), cudaErrorInvalidValue);
  good.row_sums = nullptr;
  EXPECT_EQ(LaunchShardExponents(good, nullptr), cudaSuccess);
  good.exponents = nullptr;
  EXPECT_EQ(LaunchShardExponents(good, nullptr), cudaErrorInvalidValue);
  const PartialsCase c = MakeCase(1);
  const ScoresRun run(c);
  ShardScoresParams scores;
  scores.scores = run.Params({});
  scores.exponents = reinterpret_cast<int32_t*>(memory.data());
  scores.row_sums = reinterpret_cast<int64_t*>(memory.data());
  EXPECT_EQ(LaunchShardScores(scores, nullptr), cudaErrorInvalidValue);  // no squares to read
  scores.has_sum_squares = true;
  EXPECT_EQ(LaunchShardScores(scores, nullptr), cudaSuccess);
  scores.row_sums = nullptr;
  EXPECT_EQ(LaunchShardScores(scores, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(ShardSumsTest, RowScoresAcceptsFewerTilesThanTheVocabularyHas) {
  const PartialsCase c = MakeCase(7);
  const ScoresRun run(c);
  const DeviceArray<TileSums> sums(ShardOf(c, c.sums, 0, 12));
  RowScoresParams params = run.Params({.squares = true, .entropy_sums = false});
  params.layout = PartialLayoutOf(7, 12);
  params.sums = sums.data();

  params.num_tiles = 12;
  EXPECT_EQ(LaunchRowScores(params, nullptr), cudaSuccess);
  params.num_tiles = kTiles + 1;
  EXPECT_EQ(LaunchRowScores(params, nullptr), cudaErrorInvalidValue);

  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::kernels
