#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/tile.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/params.h"
#include "kernels/row_ops/cached_gradients.h"
#include "tests/unit/kernels/common/gradient_truth.h"
#include "tests/unit/kernels/fused/fused_case.h"
#include "tests/unit/kernels/fused/gradient_case.h"
#include "tests/unit/kernels/fused/sixteen_bits.h"

namespace logprobd::testing {
namespace {

using kernels::Dtype;
using kernels::kTileColumns;

constexpr uint16_t kExponentialPoison = 0x7FB7;
constexpr int32_t kExponentPoison = -777;

/// The cache that a launch writes, and the partials of the launch.
struct CachedRun {
  int64_t row_tiles = 0;
  std::vector<uint16_t> exponentials;  ///< [num_rows + 1, row_tiles, 192]; the last row is poison.
  std::vector<int32_t> exponents;      ///< [num_rows + 1, row_tiles]; the last row is poison.
  ShardPartials partials;

  float Exponential(int64_t row, int64_t tile, int64_t column) const {
    return FromBits(Bits(row, tile, column), Dtype::kBf16);
  }
  uint16_t Bits(int64_t row, int64_t tile, int64_t column) const {
    return exponentials[static_cast<size_t>((row * row_tiles + tile) * kTileColumns + column)];
  }
  int32_t Exponent(int64_t row, int64_t tile) const {
    return exponents[static_cast<size_t>(row * row_tiles + tile)];
  }
};

int64_t TilesOf(const FusedCase& c, const ShardTiles& tiles) {
  return std::min(tiles.end, kernels::NumTiles(c.vocab_size)) - tiles.begin;
}

CachedRun Cache(const FusedCase& c, FusedRun& run, const ShardTiles& tiles = {},
                int64_t more_tiles = 0, const std::vector<kernels::TileSums>& references = {},
                const std::optional<kernels::FusedChoice>& choice = std::nullopt) {
  CachedRun cache;
  cache.row_tiles = TilesOf(c, tiles) + more_tiles;
  const auto cached_tiles = static_cast<size_t>((c.num_rows + 1) * cache.row_tiles);
  const DeviceArray<uint16_t> exponentials(
      std::vector<uint16_t>(cached_tiles * size_t{kTileColumns}, kExponentialPoison));
  const DeviceArray<int32_t> exponents(std::vector<int32_t>(cached_tiles, kExponentPoison));
  const DeviceArray<kernels::TileSums> reference_array(
      references.empty() ? std::vector<kernels::TileSums>(1) : references);
  cache.partials =
      run.PartialsOf(tiles,
                     {.values = reinterpret_cast<__nv_bfloat16*>(exponentials.data()),
                      .exponents = exponents.data(),
                      .row_tiles = cache.row_tiles,
                      .reference_sums = references.empty() ? nullptr : reference_array.data()},
                     choice);
  cache.exponentials = exponentials.Read();
  cache.exponents = exponents.Read();
  return cache;
}

template <typename T>
bool SameBytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void ExpectSamePartials(const ShardPartials& a, const ShardPartials& b) {
  EXPECT_TRUE(SameBytes(a.sums, b.sums));
  EXPECT_TRUE(SameBytes(a.entropy_sums, b.entropy_sums));
  EXPECT_TRUE(SameBytes(a.tile_max, b.tile_max));
  EXPECT_TRUE(SameBytes(a.target_logits, b.target_logits));
  EXPECT_EQ(a.max_keys, b.max_keys);
  EXPECT_EQ(a.min_keys, b.min_keys);
}

/// Returns the partials with sums of squares of 0, as a launch that caches exponentials writes
/// them.
ShardPartials WithoutSquares(ShardPartials partials) {
  for (kernels::TileSums& sums : partials.sums) sums.sum_squares = 0;
  return partials;
}

/// Returns the kernel's logits of a row, in fp32.
std::vector<float> LogitsOf(FusedRun& run, const FusedCase& c, int64_t row) {
  FusedRun::Listed listed;
  listed.rows.assign(static_cast<size_t>(c.vocab_size), static_cast<int32_t>(row));
  listed.ids.resize(static_cast<size_t>(c.vocab_size));
  std::iota(listed.ids.begin(), listed.ids.end(), 0);
  return run.ListedLogits(listed);
}

/// Compares an exponential with 2^(y - k). Allows half a unit in the last place of bf16 for the
/// rounding and two units of fp32 for the function 2^x.
void ExpectExponential(float exponential, float logit, float log2_scale, int32_t k) {
  const double exact =
      std::exp2(static_cast<double>(std::fma(logit, log2_scale, -static_cast<float>(k))));
  const double off = 0x1p-21 * exact + 0x1p-126;  // 2^x is 0 below 2^-126
  ASSERT_NEAR(exponential, exact, off + HalfUlp(exact + off, Dtype::kBf16)) << "logit " << logit;
}

/// Compares the exponentials and exponents of the first row, the last row and some rows between.
void ExpectExponentialsOfTheLogits(const FusedCase& c) {
  FusedRun run(c);
  const CachedRun cache = Cache(c, run);
  const int64_t step = std::max<int64_t>(1, c.num_rows / 5);
  for (int64_t i = 0; i < c.num_rows + step; i += step) {
    const int64_t row = std::min(i, c.num_rows - 1);
    SCOPED_TRACE(::testing::Message() << "row " << row << " of " << c.num_rows << ", hidden "
                                      << c.hidden_size << ", vocab " << c.vocab_size);
    const std::vector<float> logits = LogitsOf(run, c, row);
    const float log2_scale = kernels::Log2Scale(c.temperatures[static_cast<size_t>(row)]);
    for (int64_t tile = 0; tile < cache.row_tiles; ++tile) {
      const int32_t exponent =
          cache.partials.sums[static_cast<size_t>(cache.partials.layout.At(row, tile))].exponent;
      const bool is_real =
          exponent != kernels::kEmptyExponent && exponent != kernels::kNonfiniteExponent;
      ASSERT_EQ(cache.Exponent(row, tile), is_real ? exponent : kernels::kEmptyExponent)
          << "tile " << tile;
      for (int64_t column = 0; column < kTileColumns; ++column) {
        const int64_t id = tile * kTileColumns + column;
        if (id >= c.vocab_size) {
          ASSERT_EQ(cache.Bits(row, tile, column), 0) << "id " << id;
        } else {
          ExpectExponential(cache.Exponential(row, tile, column), logits[static_cast<size_t>(id)],
                            log2_scale, is_real ? exponent : 0);
        }
      }
    }
  }
}

class FusedExponentialsTest : public FusedTest {};

TEST_F(FusedExponentialsTest, MatchTheLogitsForAnyNumberOfRows) {
  for (const int64_t rows : {1, 64, 127, 128, 129, 300, 1'100}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      ExpectExponentialsOfTheLogits(
          MakeFusedCase({.rows = rows, .hidden = 72, .vocab = 500, .dtype = dtype}));
    }
  }
}

TEST_F(FusedExponentialsTest, MatchTheLogitsForAnyVocabularyAndHiddenSize) {
  for (const int64_t vocab : {1, 191, 192, 193, 1'000}) {
    for (const int64_t hidden : {8, 64, 72, 896}) {
      ExpectExponentialsOfTheLogits(MakeFusedCase({.rows = 9, .hidden = hidden, .vocab = vocab}));
    }
  }
}

TEST_F(FusedExponentialsTest, MatchTransformedAndPeakedLogitsAtTheRowsTemperatures) {
  for (const double stddev : {3.0, 50.0}) {
    for (const float softcap : {0.0F, 20.0F}) {
      FusedCase c =
          MakeFusedCase({.rows = 140, .hidden = 72, .vocab = 500, .logit_stddev = stddev});
      c.transform = {.scale = 0.5F, .softcap = softcap};
      c.bias.assign(500, 0.25F);
      for (size_t row = 0; row < 140; ++row) {
        c.temperatures[row] = 0.25F + static_cast<float>(row % 4);
      }
      ExpectExponentialsOfTheLogits(c);
    }
  }
}

TEST_F(FusedExponentialsTest, MaskedLogitsAndTilesHaveTheExponentialZero) {
  FusedCase c = MakeFusedCase({.rows = 9, .hidden = 64, .vocab = 600});
  c.bias.assign(600, 0.0F);
  const float mask = -std::numeric_limits<float>::infinity();
  std::fill(c.bias.begin() + kTileColumns, c.bias.begin() + 2 * kTileColumns, mask);
  c.bias[3] = mask;
  FusedRun run(c);

  const CachedRun cache = Cache(c, run);

  for (int64_t row = 0; row < 9; ++row) {
    EXPECT_EQ(cache.Bits(row, 0, 3), 0);
    EXPECT_EQ(cache.Exponent(row, 1), kernels::kEmptyExponent);
    for (int64_t column = 0; column < kTileColumns; ++column) {
      ASSERT_EQ(cache.Bits(row, 1, column), 0) << "row " << row << ", column " << column;
    }
  }
  ExpectExponentialsOfTheLogits(c);
}

TEST_F(FusedExponentialsTest, ANonfiniteRowDoesNotAffectOthers) {
  FusedCase c = MakeFusedCase({.rows = 70, .hidden = 64, .vocab = 300});
  FusedRun clean_run(c);
  const CachedRun clean = Cache(c, clean_run);
  FusedCase bad = c;
  bad.hidden[33 * 64 + 5] = std::numeric_limits<float>::quiet_NaN();
  FusedRun run(bad);

  const CachedRun cache = Cache(bad, run);

  for (int64_t row = 0; row < 70; ++row) {
    for (int64_t id = 0; id < 2 * kTileColumns; ++id) {
      const int64_t tile = id / kTileColumns;
      const int64_t column = id % kTileColumns;
      if (row == 33 && id < 300) {
        ASSERT_TRUE(std::isnan(cache.Exponential(row, tile, column))) << id;
      } else {
        ASSERT_EQ(cache.Bits(row, tile, column), clean.Bits(row, tile, column)) << row;
      }
    }
  }
  EXPECT_EQ(cache.Exponent(33, 0), kernels::kEmptyExponent);
}

TEST_F(FusedExponentialsTest, EveryInstanceCachesTheSameBits) {
  using kernels::FusedTile;
  for (const int64_t rows : {1, 95, 300}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      for (const bool transforms : {false, true}) {
        FusedCase c = MakeFusedCase(
            {.rows = rows, .hidden = 320, .vocab = 1'500, .logit_stddev = 20, .dtype = dtype});
        c.entropy_temperatures.assign(static_cast<size_t>(rows), 2.0F);
        c.hidden[5] = std::numeric_limits<float>::quiet_NaN();
        if (transforms) {
          c.transform = {.scale = 0.5F, .softcap = 20.0F};
          c.bias.assign(1'500, 0.25F);
          c.bias[700] = -std::numeric_limits<float>::infinity();
        }
        FusedRun run(c);
        for (const bool has_references : {false, true}) {
          std::vector<kernels::TileSums> references;
          // Tiles whose exponent is far above the reference keep their own.
          for (int32_t row = 0; has_references && row < rows; ++row) {
            references.push_back({row % 40 - 30, 1.0F, 0.0F, 0.0F});
          }
          const auto cached = [&](FusedTile tile) {
            const kernels::FusedChoice choice = {tile, kernels::FusedRaster::kAlongRows, 1};
            return Cache(c, run, {}, 1, references, choice);
          };
          const CachedRun truth = cached(FusedTile::kMma128);
          for (const FusedTile tile : CachingTilesToTest()) {
            SCOPED_TRACE(::testing::Message()
                         << rows << " rows, transforms " << transforms << ", references "
                         << has_references << ", tile " << static_cast<int>(tile));
            const CachedRun cache = cached(tile);
            EXPECT_EQ(cache.exponents, truth.exponents);
            EXPECT_EQ(cache.exponentials, truth.exponentials);
            ExpectSamePartials(cache.partials, truth.partials);
          }
        }
      }
    }
  }
}

TEST_F(FusedExponentialsTest, CachingDoesNotChangeTheBitsOfThePartials) {
  for (const int64_t rows : {1, 64, 128, 300, 1'100}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      for (const bool transforms : {false, true}) {
        SCOPED_TRACE(::testing::Message() << rows << " rows, transforms " << transforms);
        FusedCase c = MakeFusedCase({.rows = rows, .hidden = 320, .vocab = 1'500, .dtype = dtype});
        c.entropy_temperatures.assign(static_cast<size_t>(rows), 2.0F);
        if (transforms) {
          c.transform = {.scale = 0.5F, .softcap = 20.0F};
          c.bias.assign(1'500, 0.25F);
        }
        FusedRun run(c);

        const ShardPartials with = Cache(c, run).partials;

        ExpectSamePartials(with, WithoutSquares(run.PartialsOf({})));
      }
    }
  }
}

/// Compares exponentials relative to the exponent of one tile with exponentials relative to each
/// tile's own exponent.
void ExpectExponentialsRelativeTo(const FusedCase& c, int64_t reference_tile, int64_t& num_above) {
  FusedRun run(c);
  const CachedRun plain = Cache(c, run);
  std::vector<kernels::TileSums> references;
  for (int64_t row = 0; row < c.num_rows; ++row) {
    const kernels::PartialLayout& layout = plain.partials.layout;
    references.push_back(plain.partials.sums[static_cast<size_t>(layout.At(row, reference_tile))]);
  }

  const CachedRun rebased = Cache(c, run, {}, 0, references);

  ExpectSamePartials(rebased.partials, plain.partials);
  for (int64_t row = 0; row < c.num_rows; ++row) {
    const int32_t reference = references[static_cast<size_t>(row)].exponent;
    for (int64_t tile = 0; tile < plain.row_tiles; ++tile) {
      const int32_t exponent = plain.Exponent(row, tile);
      const bool is_real = exponent != kernels::kEmptyExponent;
      const bool is_above = reference == kernels::kEmptyExponent ||
                            int64_t{exponent} - reference > int64_t{kernels::kReferenceReach};
      num_above += is_real && is_above ? 1 : 0;
      const bool is_scaled = is_real && !is_above;
      ASSERT_EQ(rebased.Exponent(row, tile), is_scaled ? reference : exponent) << "tile " << tile;
      for (int64_t column = 0; column < kTileColumns; ++column) {
        const float exponential = plain.Exponential(row, tile, column);
        const float expected =
            is_scaled ? std::ldexp(exponential, exponent - reference) : exponential;
        if (std::fabs(expected) < 0x1p-120F) continue;  // bits of subnormal values are lost
        ASSERT_EQ(rebased.Exponential(row, tile, column), expected)
            << "row " << row << ", tile " << tile << ", column " << column;
      }
    }
  }
}

TEST_F(FusedExponentialsTest, AReferenceExponentScalesExponentialsByAPowerOfTwo) {
  int64_t num_above = 0;
  for (const bool transforms : {false, true}) {
    FusedCase c = MakeFusedCase({.rows = 140, .hidden = 72, .vocab = 1'000, .logit_stddev = 3});
    if (transforms) c.transform = {.scale = 0.5F, .softcap = 20.0F};
    ExpectExponentialsRelativeTo(c, 0, num_above);
    ExpectExponentialsRelativeTo(c, 5, num_above);
  }
  EXPECT_EQ(num_above, 0);
}

TEST_F(FusedExponentialsTest, TilesFarAboveTheReferenceOrWithoutOneKeepTheirOwnExponent) {
  FusedCase c = MakeFusedCase({.rows = 140, .hidden = 72, .vocab = 1'000, .logit_stddev = 60});
  int64_t num_above = 0;
  ExpectExponentialsRelativeTo(c, 3, num_above);
  EXPECT_GT(num_above, 0);

  c.bias.assign(1'000, 0.0F);
  std::fill(c.bias.begin(), c.bias.begin() + kTileColumns, -std::numeric_limits<float>::infinity());
  num_above = 0;
  ExpectExponentialsRelativeTo(c, 0, num_above);
  EXPECT_EQ(num_above, 140 * 5);
}

TEST_F(FusedExponentialsTest, AShardHasTheExponentialsOfTheWholeAndWritesNothingElse) {
  const FusedCase c = MakeFusedCase({.rows = 130, .hidden = 64, .vocab = 1'000});
  FusedRun run(c);
  const CachedRun whole = Cache(c, run);
  for (const ShardTiles& tiles : {ShardTiles{0, 1}, ShardTiles{2, 5}, ShardTiles{5, 6}}) {
    const int64_t num_tiles = tiles.end - tiles.begin;

    const CachedRun shard = Cache(c, run, tiles, 2);

    for (int64_t row = 0; row <= 130; ++row) {
      for (int64_t tile = 0; tile < num_tiles + 2; ++tile) {
        const bool is_written = row < 130 && tile < num_tiles;
        ASSERT_EQ(shard.Exponent(row, tile),
                  is_written ? whole.Exponent(row, tiles.begin + tile) : kExponentPoison)
            << "row " << row << ", tile " << tile;
        for (int64_t column = 0; column < kTileColumns; ++column) {
          ASSERT_EQ(shard.Bits(row, tile, column),
                    is_written ? whole.Bits(row, tiles.begin + tile, column) : kExponentialPoison)
              << "row " << row << ", tile " << tile << ", column " << column;
        }
      }
    }
  }
}

// The backward pass reads the exponentials that the forward pass caches, so its error is half a
// unit in the last place of bf16.
TEST_F(FusedExponentialsTest, CachedGradientsAreAsAccurateAsTheExponentials) {
  GradientCase c = MakeGradientCase({.rows = 130, .hidden = 72, .vocab = 1'000});
  const GradientRun gradient_run(c);
  FusedRun run(c.head);
  const CachedRun cache = Cache(c.head, run);
  std::vector<kernels::RowGradient> rows = gradient_run.constants();
  for (size_t row = 0; row < rows.size(); ++row) {
    const kernels::LogitEntry largest = kernels::LogitEntryOf(cache.partials.max_keys[row]);
    const auto exponent = [&](float logit) {
      return std::fma(logit, rows[row].log2_scale, -rows[row].log2_sum);
    };
    rows[row].max_column = largest.id;
    rows[row].max_exponent = exponent(largest.logit);
    rows[row].target_exponent = exponent(cache.partials.target_logits[row]);
  }
  const DeviceArray<uint16_t> exponentials(cache.exponentials);
  const DeviceArray<int32_t> exponents(cache.exponents);
  const DeviceArray<kernels::RowGradient> row_array(rows);
  const DeviceArray<uint16_t> gradients(
      std::vector<uint16_t>(size_t{130} * 6 * kTileColumns, kGradientPoison));

  ASSERT_EQ(kernels::LaunchCachedGradients(
                {.num_rows = 130,
                 .exponentials = reinterpret_cast<const __nv_bfloat16*>(exponentials.data()),
                 .exponents = exponents.data(),
                 .row_tiles = 6,
                 .tile_end = 6,
                 .rows = row_array.data(),
                 .gradients = gradients.data(),
                 .gradient_stride = 6 * kTileColumns},
                nullptr),
            cudaSuccess);

  const std::vector<uint16_t> from_exponentials = gradients.Read();
  const std::vector<uint16_t> from_logits = gradient_run.Run();
  ASSERT_EQ(from_exponentials.size(), from_logits.size());
  for (size_t i = 0; i < from_exponentials.size(); ++i) {
    const size_t row = i / (6 * kTileColumns);
    const size_t column = i % (6 * kTileColumns);
    const double p = column < 1'000 ? gradient_run.truth()[row].softmax.p[column] : 0.0;
    const double logits_gradient = FromBits(from_logits[i], Dtype::kBf16);
    // An exponential has an error of 2^-8, which is multiplied by p's factor and by the entropy's
    // factor; both are at most 10.
    ASSERT_NEAR(FromBits(from_exponentials[i], Dtype::kBf16), logits_gradient,
                10 * p * 0x1p-7 + 2 * HalfUlp(1.1 * logits_gradient, Dtype::kBf16))
        << "row " << row << ", column " << column;
  }
}

TEST_F(FusedExponentialsTest, RefusesWhatItCannotServe) {
  const FusedCase c = MakeFusedCase({.rows = 2, .hidden = 64, .vocab = 400});
  const FusedRun run(c);
  const DeviceArray<uint16_t> exponentials(std::vector<uint16_t>(size_t{2} * 3 * kTileColumns + 8));
  const DeviceArray<int32_t> exponents(std::vector<int32_t>(6));
  kernels::FusedPartialsParams good = run.Partials();
  good.exponentials = {.values = reinterpret_cast<__nv_bfloat16*>(exponentials.data()),
                       .exponents = exponents.data(),
                       .row_tiles = 3};
  const auto launch_with = [&](const auto& change) {
    kernels::FusedPartialsParams params = good;
    change(params);
    return LaunchPartials(params, run.stream());
  };
  using Params = kernels::FusedPartialsParams;
  EXPECT_EQ(launch_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(launch_with([](Params& p) { p.exponentials.exponents = nullptr; }),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.exponentials.values += 1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.exponentials.row_tiles = 2; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.wants_sum_squares = true; }), cudaErrorInvalidValue);
  for (const kernels::FusedTile tile : TilesToTest()) {
    const std::vector<kernels::FusedTile> able = CachingTilesToTest();
    if (std::find(able.begin(), able.end(), tile) != able.end()) continue;
    EXPECT_EQ(kernels::LaunchFusedPartialsAs(good, {tile, kernels::FusedRaster::kAlongRows, 1},
                                             run.stream()),
              cudaErrorInvalidValue);
  }
  EXPECT_EQ(cudaStreamSynchronize(run.stream()), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::testing
