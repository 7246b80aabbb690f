#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/tile.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/params.h"
#include "tests/unit/kernels/fused/gradient_case.h"
#include "tests/unit/kernels/fused/sixteen_bits.h"

namespace logprobd::testing {
namespace {

using kernels::Dtype;
using kernels::FusedChoice;
using kernels::FusedRaster;
using kernels::FusedTile;
using kernels::kTileColumns;

constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kF16};

std::vector<float> Waves(int64_t count, double height) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>(height * std::sin(static_cast<double>(i))));
  }
  return values;
}

void AddMeanLogitWeights(GradientCase& c) {
  c.mean_logit_weights = Waves(c.head.vocab_size, 1e-2);
  for (size_t row = 0; row < c.upstream.size(); ++row) {
    c.upstream[row].mean_logit = static_cast<double>(row % 3) - 1;
  }
}

/// Returns the bits of one row.
std::vector<uint16_t> RowOf(const std::vector<uint16_t>& gradients, const GradientCase& c,
                            int64_t row) {
  const int64_t columns = c.num_tiles() * kTileColumns;
  const auto begin = gradients.begin() + row * columns;
  return {begin, begin + columns};
}

class FusedGradientTest : public FusedTest {};

TEST_F(FusedGradientTest, MatchesTheTruthForAnyNumberOfRows) {
  for (const int64_t rows : {1, 64, 127, 128, 129, 300}) {
    for (const Dtype dtype : kDtypes) {
      ExpectTrueGradients(
          MakeGradientCase({.rows = rows, .hidden = 72, .vocab = 500, .dtype = dtype}));
    }
  }
}

TEST_F(FusedGradientTest, MatchesTheTruthForAnyVocabularyAndHiddenSize) {
  for (const int64_t vocab : {1, 191, 192, 193, 1'000}) {
    for (const int64_t hidden : {8, 64, 72, 896}) {
      for (const Dtype dtype : kDtypes) {
        ExpectTrueGradients(
            MakeGradientCase({.rows = 129, .hidden = hidden, .vocab = vocab, .dtype = dtype}));
      }
    }
  }
}

TEST_F(FusedGradientTest, MatchesTheTruthForFlatAndPeakedRowsAtTheRowsTemperatures) {
  for (const double stddev : {0.5, 10.0, 20.0}) {
    GradientCase c =
        MakeGradientCase({.rows = 20, .hidden = 64, .vocab = 700, .logit_stddev = stddev});
    for (size_t row = 0; row < 20; ++row) {
      c.head.temperatures[row] = 0.1F + 0.25F * static_cast<float>(row % 8);
    }
    ExpectTrueGradients(c);
  }
}

TEST_F(FusedGradientTest, MatchesTheTruthForEachUpstreamGradientAlone) {
  for (const ScoreGradients& upstream :
       {ScoreGradients{.lse = 1.5}, ScoreGradients{.logprob = 1}, ScoreGradients{.entropy = 1},
        ScoreGradients{.mean_logit = 1}}) {
    GradientCase c = MakeGradientCase({.rows = 10, .hidden = 64, .vocab = 400});
    AddMeanLogitWeights(c);
    std::fill(c.upstream.begin(), c.upstream.end(), upstream);
    ExpectTrueGradients(c);
  }
}

TEST_F(FusedGradientTest, AppliesScaleBiasAndCap) {
  for (const bool with_bias : {false, true}) {
    for (const float scale : {1.0F, 0.0625F, -0.5F}) {
      for (const float softcap : {0.0F, 5.0F, 30.0F}) {
        GradientCase c =
            MakeGradientCase({.rows = 140, .hidden = 72, .vocab = 500, .logit_stddev = 10});
        c.head.transform = {.scale = scale, .softcap = softcap};
        if (with_bias) c.head.bias = Waves(500, 2);
        ExpectTrueGradients(c);
      }
    }
  }
}

TEST_F(FusedGradientTest, AppliesTheMeanLogitWeights) {
  for (const float softcap : {0.0F, 10.0F}) {
    GradientCase c = MakeGradientCase({.rows = 140, .hidden = 72, .vocab = 1'000});
    c.head.transform.softcap = softcap;
    AddMeanLogitWeights(c);
    ExpectTrueGradients(c);
  }
}

TEST_F(FusedGradientTest, MultipliesFp32RowsAsBf16Splits) {
  GradientCase c = MakeGradientCase({.rows = 140, .hidden = 200, .vocab = 500, .is_f32 = true});
  c.dot_error = 2e-5;  // two splits represent a value to 2^-17
  ExpectTrueGradients(c);
}

TEST_F(FusedGradientTest, LargeLogitsKeepTheirDifferences) {
  for (const float shift : {7e4F, -7e4F}) {
    GradientCase c = MakeGradientCase({.rows = 5, .hidden = 64, .vocab = 500});
    c.dot_error = 0;  // multiples of 1/8 are exact in fp32 even after the shift
    for (float& value : c.head.hidden) value = std::round(value);
    for (float& value : c.head.weight) value = std::round(value * 8) / 8;
    c.head.bias.assign(500, shift);
    ExpectTrueGradients(c);
  }
}

TEST_F(FusedGradientTest, ATargetOfAnotherShardAddsNothing) {
  for (const bool transforms : {false, true}) {
    GradientCase c = MakeGradientCase({.rows = 4, .hidden = 64, .vocab = 300});
    if (transforms) AddMeanLogitWeights(c);
    // The targets are before the shard, in the padding of its last tile, just after the tile, and
    // far away.
    c.head.targets = {-1, 301, 384, 1 << 20};
    ExpectTrueGradients(c);
  }
}

TEST_F(FusedGradientTest, ARowHasTheSameBitsForAnyNumberAndOrderOfRows) {
  for (const bool transforms : {false, true}) {
    GradientCase all = MakeGradientCase({.rows = 300, .hidden = 320, .vocab = 500});
    if (transforms) {
      AddMeanLogitWeights(all);
      all.head.bias = Waves(500, 1);
      all.head.transform = {.scale = 0.5F, .softcap = 20.0F};
    }
    const std::vector<uint16_t> truth = GradientRun(all).Run();
    std::vector<int64_t> shuffled(300);
    std::iota(shuffled.begin(), shuffled.end(), 0);
    std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(5));
    for (const size_t count : {1U, 64U, 127U, 129U, 300U}) {
      const std::vector<int64_t> rows(shuffled.begin(),
                                      shuffled.begin() + static_cast<int64_t>(count));

      const GradientCase some = SelectRows(all, rows);
      const std::vector<uint16_t> gradients = GradientRun(some).Run();

      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(RowOf(gradients, some, static_cast<int64_t>(i)), RowOf(truth, all, rows[i]))
            << "row " << i << " of " << count;
      }
    }
  }
}

// The cap is computed in a shorter way where all logits of a warp are small.
TEST_F(FusedGradientTest, ACappedRowDoesNotDependOnItsNeighbours) {
  GradientCase all = MakeGradientCase({.rows = 300, .hidden = 320, .vocab = 500});
  all.head.transform = {.scale = 0.5F, .softcap = 5.0F};
  std::vector<int64_t> small;
  for (int64_t row = 0; row < all.head.num_rows; row += 3) {
    small.push_back(row);
    float* const hidden = &all.head.hidden[static_cast<size_t>(row * all.head.hidden_size)];
    for (int64_t k = 0; k < all.head.hidden_size; ++k) hidden[k] /= 16;
  }
  const GradientCase some = SelectRows(all, small);
  for (const FusedTile tile : GradientTilesToTest()) {
    const FusedChoice choice = {tile, FusedRaster::kAlongRows, 1};
    const std::vector<uint16_t> truth = GradientRun(all).Run({}, {.choice = choice});

    const std::vector<uint16_t> gradients = GradientRun(some).Run({}, {.choice = choice});

    for (size_t i = 0; i < small.size(); ++i) {
      ASSERT_EQ(RowOf(gradients, some, static_cast<int64_t>(i)), RowOf(truth, all, small[i]))
          << "row " << small[i];
    }
  }
}

TEST_F(FusedGradientTest, EveryInstanceAndOrderGivesTheSameBits) {
  for (const bool transforms : {false, true}) {
    for (const Dtype dtype : kDtypes) {
      GradientCase c =
          MakeGradientCase({.rows = 300, .hidden = 320, .vocab = 1'500, .dtype = dtype});
      if (transforms) {
        AddMeanLogitWeights(c);
        c.head.bias = Waves(1'500, 1);
        c.head.transform = {.scale = 0.5F, .softcap = 2.0F};  // both ways of Tanh
      }
      const GradientRun run(c);
      const std::vector<uint16_t> truth = run.Run();
      for (const FusedTile tile : GradientTilesToTest()) {
        for (const FusedRaster raster : {FusedRaster::kAlongRows, FusedRaster::kAlongVocab}) {
          for (const int32_t swizzle : {1, 8}) {
            EXPECT_EQ(run.Run({}, {.choice = FusedChoice{tile, raster, swizzle}}), truth);
          }
        }
      }
    }
  }
}

TEST_F(FusedGradientTest, ARowCountInDeviceMemoryDoesNotChangeTheFirstRows) {
  constexpr int64_t kRows = 1'200;
  const GradientCase c = MakeGradientCase({.rows = kRows, .hidden = 320, .vocab = 1'500});
  const GradientRun run(c);
  const std::vector<uint16_t> truth = run.Run();
  const int64_t columns = c.num_tiles() * kTileColumns;
  const auto expect_first = [&](int64_t count, const FusedChoice& choice) {
    const std::vector<uint16_t> some = run.Run({}, {.choice = choice, .row_count = count});
    const auto end = some.begin() + count * columns;
    EXPECT_TRUE(std::equal(some.begin(), end, truth.begin())) << count << " rows";
    // Exactly the clusters that contain computed rows are written.
    const int64_t cluster_rows = kernels::ClusterRows(choice.tile);
    const int64_t computed = (count + cluster_rows - 1) / cluster_rows * cluster_rows;
    EXPECT_TRUE(std::all_of(some.begin() + std::min(computed, kRows) * columns, some.end(),
                            [](uint16_t bits) { return bits == kGradientPoison; }))
        << count << " rows";
  };
  for (const FusedTile tile : GradientTilesToTest()) {
    for (const FusedRaster raster : {FusedRaster::kAlongRows, FusedRaster::kAlongVocab}) {
      for (const int32_t swizzle : {1, 8}) {
        for (const int64_t count : {0, 1, 128, 300, 600, 1'100, 1'200}) {
          expect_first(count, {tile, raster, swizzle});
        }
      }
    }
  }
}

TEST_F(FusedGradientTest, AnyCutIntoLaunchesGivesTheSameBits) {
  for (const bool transforms : {false, true}) {
    for (const int64_t rows : {3, 200}) {
      GradientCase c = MakeGradientCase({.rows = rows, .hidden = 72, .vocab = 2'000});
      if (transforms) {
        AddMeanLogitWeights(c);
        c.head.bias = Waves(2'000, 1);
      }
      const GradientRun run(c);
      const std::vector<uint16_t> whole = run.Run();
      for (const TileCuts& cuts : std::vector<TileCuts>{{0, 1, 11}, {0, 4, 5, 11}, {0, 10, 11}}) {
        EXPECT_EQ(run.Run(cuts), whole) << rows << " rows, " << cuts.size() - 1 << " launches";
      }
    }
  }
}

// If the buffer has room, the kernel reads whole block tiles, including rows that earlier batches
// left there.
TEST_F(FusedGradientTest, RowsAfterTheLastOneDoNotAffectTheResult) {
  for (const int64_t rows : {1, 65, 129}) {
    const GradientCase c = MakeGradientCase({.rows = rows, .hidden = 320, .vocab = 500});

    EXPECT_EQ(GradientRun(c, 512).Run(), GradientRun(c).Run()) << rows << " rows";
  }
}

TEST_F(FusedGradientTest, ANonfiniteRowDoesNotAffectOthers) {
  for (const bool transforms : {false, true}) {
    GradientCase c = MakeGradientCase({.rows = 70, .hidden = 64, .vocab = 600});
    if (transforms) AddMeanLogitWeights(c);
    const std::vector<uint16_t> clean = GradientRun(c).Run();
    c.head.hidden[33 * 64 + 5] = std::numeric_limits<float>::quiet_NaN();

    const std::vector<uint16_t> gradients = GradientRun(c).Run();

    for (int64_t row = 0; row < 70; ++row) {
      if (row != 33) {
        ASSERT_EQ(RowOf(gradients, c, row), RowOf(clean, c, row)) << "row " << row;
        continue;
      }
      const std::vector<uint16_t> bad = RowOf(gradients, c, row);
      for (size_t column = 0; column < bad.size(); ++column) {
        const float gradient = FromBits(bad[column], Dtype::kBf16);
        ASSERT_TRUE(column < 600 ? std::isnan(gradient) : gradient == 0.0F) << column;
      }
    }
  }
}

TEST_F(FusedGradientTest, MaskedColumnsHaveNoGradient) {
  GradientCase c = MakeGradientCase({.rows = 70, .hidden = 64, .vocab = 600});
  c.head.bias.assign(600, 0.0F);
  for (size_t i = 0; i < 600; i += 2) {
    c.head.bias[i] = -std::numeric_limits<float>::infinity();
  }
  for (int32_t& target : c.head.targets) target |= 1;
  const GradientRun run(c);

  const std::vector<uint16_t> gradients = run.Run();

  for (int64_t row = 0; row < 70; ++row) {
    const std::vector<uint16_t> bits = RowOf(gradients, c, row);
    for (size_t column = 0; column < 600; column += 2) {
      ASSERT_EQ(FromBits(bits[column], Dtype::kBf16), 0.0F) << "row " << row;
    }
  }
  ExpectNearTruth(c, run.truth(), gradients);
}

TEST_F(FusedGradientTest, RefusesBrokenBounds) {
  const GradientCase c = MakeGradientCase({.rows = 2, .hidden = 64, .vocab = 400});
  const GradientRun run(c);
  const DeviceArray<uint16_t> gradients(std::vector<uint16_t>(size_t{2} * 3 * kTileColumns + 8));
  kernels::FusedGradientParams good = run.Params();
  good.gradients = gradients.data();
  good.gradient_stride = 3 * kTileColumns;
  const auto launch_with = [&](const auto& change) {
    kernels::FusedGradientParams params = good;
    change(params);
    return LaunchGradient(params, run.stream());
  };
  using Params = kernels::FusedGradientParams;
  EXPECT_EQ(launch_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(LaunchGradient({}, run.stream()), cudaSuccess);  // no rows
  EXPECT_EQ(launch_with([](Params& p) { p.head.num_rows = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.head.readable_rows = 1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.head.dtype = Dtype::kF32; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.head.weight = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.head.tile_end = 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.rows = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.gradients = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.gradients = static_cast<uint16_t*>(p.gradients) + 1; }),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.gradient_stride -= 8; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.gradient_stride += 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(cudaStreamSynchronize(run.stream()), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::testing
