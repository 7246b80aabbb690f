#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/combine/row_scores.h"
#include "kernels/common/logit_key.h"
#include "tests/unit/kernels/chunked/device_array.h"

// Partials of rows, which the tests of the combining kernels split into shards, and the scores that
// one kernel computes from all partials.
namespace logprobd::kernels::partials_case {

using logprobd::testing::DeviceArray;

inline constexpr int64_t kTiles = 29;
inline constexpr int64_t kVocab = kTiles * kTileColumns - 5;
inline constexpr size_t kFloatOutputs = 7;
/// Boundaries of the shards in tiles. The 29 tiles are split unevenly; some shards have one tile.
inline const std::vector<std::vector<int64_t>> kCuts = {
    {0, 29}, {0, 28, 29}, {0, 1, 17, 29}, {0, 3, 4, 11, 28, 29}};

/// Inputs of all shards.
struct PartialsCase {
  int64_t num_rows = 0;
  std::vector<TileSums> sums;          ///< [num_rows, kTiles]
  std::vector<TileSums> entropy_sums;  ///< [num_rows, kTiles]
  std::vector<uint64_t> max_keys;      ///< [num_rows], like all members below.
  std::vector<uint32_t> min_keys;
  std::vector<float> log2_scales;
  std::vector<float> target_logits;
};

/// Makes plausible sums. The rows alternate between: close exponents; exponents so far apart that
/// most tiles add nothing; many empty tiles; one nonfinite tile; all tiles empty; a single tile.
inline std::vector<TileSums> MakeTiles(int64_t num_rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> unit(0.0F, 1.0F);
  std::vector<TileSums> tiles;
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto special = static_cast<int64_t>(random() % kTiles);
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      const float spread = row % 6 == 1 ? 4'000.0F : 30.0F;
      const auto exponent = static_cast<int32_t>(spread * (unit(random) - 0.5F));
      const float sum = 0.5F + 190.0F * unit(random);
      TileSums sums = {exponent, sum, -20.0F * sum * unit(random), 0.25F + sum * unit(random)};
      const bool is_empty = (row % 6 == 2 && tile != special && random() % 3 != 0) ||
                            row % 6 == 4 || (row % 6 == 5 && tile != special);
      if (is_empty) sums = {kEmptyExponent, 0.0F, 0.0F, 0.0F};
      if (row % 6 == 3 && tile == special) sums = {kNonfiniteExponent, 0.0F, 0.0F, 0.0F};
      tiles.push_back(sums);
    }
  }
  return tiles;
}

inline PartialsCase MakeCase(int64_t num_rows) {
  PartialsCase c;
  c.num_rows = num_rows;
  c.sums = MakeTiles(num_rows, 7);
  c.entropy_sums = MakeTiles(num_rows, 11);
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto logit = static_cast<float>(row % 23);
    c.max_keys.push_back(LogitKey(logit, static_cast<int32_t>(row * 97 % kVocab)));
    c.min_keys.push_back(~OrderedBits(-logit));
    c.log2_scales.push_back(Log2Scale(0.5F + static_cast<float>(row % 5)));
    c.target_logits.push_back(logit - 3.0F);
  }
  return c;
}

/// Returns tiles [begin, end) of every row in the layout of a shard.
inline std::vector<TileSums> ShardOf(const PartialsCase& c, const std::vector<TileSums>& tiles,
                                     int64_t begin, int64_t end) {
  const PartialLayout layout = PartialLayoutOf(c.num_rows, end - begin);
  std::vector<TileSums> shard(static_cast<size_t>(c.num_rows * (end - begin)));
  for (int64_t row = 0; row < c.num_rows; ++row) {
    for (int64_t tile = begin; tile < end; ++tile) {
      shard[static_cast<size_t>(layout.At(row, tile - begin))] =
          tiles[static_cast<size_t>(row * kTiles + tile)];
    }
  }
  return shard;
}

struct Ask {
  bool squares = true;
  bool entropy_sums = true;
};

struct Outputs {
  std::vector<RowNormalizer> normalizers;
  std::vector<uint8_t> nonfinite;
  std::vector<int32_t> argmax_id;
  std::vector<float> floats;  ///< [kFloatOutputs, num_rows]
};

/// Inputs and outputs of the last step in device memory.
class ScoresRun {
 public:
  explicit ScoresRun(const PartialsCase& c)
      : num_rows_(c.num_rows),
        max_keys_(c.max_keys),
        min_keys_(c.min_keys),
        log2_scales_(c.log2_scales),
        target_logits_(c.target_logits),
        normalizers_(std::vector<RowNormalizer>(c.max_keys.size(), {77, 7.0, true})),
        nonfinite_(std::vector<uint8_t>(c.max_keys.size(), 77)),
        argmax_id_(std::vector<int32_t>(c.max_keys.size(), -77)),
        floats_(std::vector<float>(c.max_keys.size() * kFloatOutputs, -777.0F)) {}

  RowScoresParams Params(const Ask& ask) const {
    RowScoresParams params;
    params.num_rows = num_rows_;
    params.vocab_size = kVocab;
    params.max_keys = max_keys_.data();
    params.min_keys = min_keys_.data();
    params.log2_scales = log2_scales_.data();
    params.logit_correction = 1.25F;
    params.target_logits = target_logits_.data();
    params.normalizers = normalizers_.data();
    params.nonfinite = nonfinite_.data();
    params.argmax_id = argmax_id_.data();
    params.logprob = floats_.data();
    params.entropy = floats_.data() + num_rows_;
    params.lse = floats_.data() + 2 * num_rows_;
    params.argmax_logprob = floats_.data() + 3 * num_rows_;
    params.max_logit = floats_.data() + 4 * num_rows_;
    params.min_logit = floats_.data() + 5 * num_rows_;
    if (ask.squares) params.sum_p_squared = floats_.data() + 6 * num_rows_;
    return params;
  }

  Outputs Read() const {
    return {normalizers_.Read(), nonfinite_.Read(), argmax_id_.Read(), floats_.Read()};
  }

 private:
  int64_t num_rows_;
  DeviceArray<uint64_t> max_keys_;
  DeviceArray<uint32_t> min_keys_;
  DeviceArray<float> log2_scales_;
  DeviceArray<float> target_logits_;
  DeviceArray<RowNormalizer> normalizers_;
  DeviceArray<uint8_t> nonfinite_;
  DeviceArray<int32_t> argmax_id_;
  DeviceArray<float> floats_;
};

/// Computes the scores from all tiles in one kernel.
inline Outputs ScoreWhole(const PartialsCase& c, const Ask& ask) {
  const ScoresRun run(c);
  const DeviceArray<TileSums> sums(ShardOf(c, c.sums, 0, kTiles));
  const DeviceArray<TileSums> entropy_sums(ShardOf(c, c.entropy_sums, 0, kTiles));
  RowScoresParams params = run.Params(ask);
  params.num_tiles = kTiles;
  params.layout = PartialLayoutOf(c.num_rows, kTiles);
  params.sums = sums.data();
  if (ask.entropy_sums) params.entropy_sums = entropy_sums.data();
  EXPECT_EQ(LaunchRowScores(params, nullptr), cudaSuccess);
  return run.Read();
}

inline void ExpectSameBits(const Outputs& a, const Outputs& b) {
  EXPECT_EQ(a.nonfinite, b.nonfinite);
  EXPECT_EQ(a.argmax_id, b.argmax_id);
  EXPECT_EQ(std::memcmp(a.floats.data(), b.floats.data(), a.floats.size() * sizeof(float)), 0);
  ASSERT_EQ(a.normalizers.size(), b.normalizers.size());
  for (size_t row = 0; row < a.normalizers.size(); ++row) {
    ASSERT_EQ(a.normalizers[row].exponent, b.normalizers[row].exponent) << "row " << row;
    ASSERT_EQ(a.normalizers[row].log2_sum, b.normalizers[row].log2_sum) << "row " << row;
    ASSERT_EQ(a.normalizers[row].finite, b.normalizers[row].finite) << "row " << row;
  }
}

}  // namespace logprobd::kernels::partials_case
