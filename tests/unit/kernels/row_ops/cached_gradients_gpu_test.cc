#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/row_ops/cached_gradients.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/row_ops/cached_case.h"

namespace logprobd::kernels {
namespace {

using namespace cached_case;  // NOLINT: helpers of these tests

constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kF16};

class CachedGradientsTest : public testing::GpuTest {};

void ExpectTruth(const CachedCase& c) {
  const std::vector<RowGradient> rows = ConstantsOf(c);
  for (const Dtype dtype : kDtypes) {
    ExpectNearTruth(c, CachedRun(c).Run(rows, {.dtype = dtype}), dtype);
  }
}

// The sizes are at the edges of a tile, and above the number of tiles that a block processes at
// once (8) and in total (32).
TEST_F(CachedGradientsTest, MatchTheTruthAtVocabularyEdges) {
  for (const int64_t vocab : {1, 191, 192, 193, 1'000, 1'537, 3'072, 3'073, 6'200}) {
    ExpectTruth(MakeCachedCase(5, vocab, 3));
  }
}

TEST_F(CachedGradientsTest, MatchTheTruthForFlatAndPeakedRows) {
  for (const double stddev : {0.0, 1.0, 20.0, 100.0}) ExpectTruth(MakeCachedCase(9, 1'000, stddev));
}

TEST_F(CachedGradientsTest, MatchTheTruthForEachUpstreamGradientAlone) {
  CachedCase c = MakeCachedCase(6, 700, 3);
  for (const ScoreGradients& upstream :
       {ScoreGradients{.lse = 1.5}, ScoreGradients{.logprob = 1}, ScoreGradients{.entropy = 1}}) {
    for (CachedRow& row : c.rows) row.upstream = upstream;
    ExpectTruth(c);
  }
}

TEST_F(CachedGradientsTest, MatchTheTruthForALargeLse) {
  for (const float offset : {7e4F, -7e4F}) {
    CachedCase c = MakeCachedCase(4, 500, 3);
    for (CachedRow& row : c.rows) {
      for (float& logit : row.logits) logit += offset;
    }
    ExpectTruth(c);
  }
}

TEST_F(CachedGradientsTest, MatchTheTruthWithACap) {
  for (const float softcap : {5.0F, 30.0F}) ExpectTruth(MakeCachedCase(8, 700, 10, softcap));
}

// 1 - p is smaller than the rounding error of a cached exponential.
TEST_F(CachedGradientsTest, ANearlyCertainTargetKeepsItsSmallGradient) {
  CachedCase c = MakeCachedCase(1, 1'000, 0);
  c.rows[0].temperature = 1;
  c.rows[0].target = 333;
  c.rows[0].logits[333] = std::log(999e4F) + 0.01F;  // not a power of two
  c.rows[0].upstream = {.logprob = 1};

  const std::vector<uint16_t> gradients = CachedRun(c).Run(ConstantsOf(c));

  const double rest = 1 - SoftmaxOf(c.rows[0]).p[333];
  ASSERT_NEAR(rest, 1e-4, 2e-6);
  EXPECT_NEAR(testing::FromBits(gradients[333], Dtype::kBf16), kScale * rest, 0.01 * kScale * rest);
  ExpectTruth(c);
}

TEST_F(CachedGradientsTest, ANearlyCertainLargestLogitKeepsItsSmallGradient) {
  CachedCase c = MakeCachedCase(1, 1'000, 0);
  c.rows[0].temperature = 1;
  c.rows[0].target = 7;
  c.rows[0].logits[777] = std::log(999e4F) + 0.01F;
  c.rows[0].upstream = {.entropy = 1};

  const std::vector<uint16_t> gradients = CachedRun(c).Run(ConstantsOf(c));

  const RowSoftmax truth = SoftmaxOf(c.rows[0]);
  const double expected = kScale * testing::TextbookGradient(truth, 777, c.rows[0].upstream, {});
  ASSERT_LT(std::fabs(expected), 2e-3);  // rounding p to bf16 causes errors of up to 4e-3
  EXPECT_NEAR(testing::FromBits(gradients[777], Dtype::kBf16), expected,
              0.01 * std::fabs(expected));
  ExpectTruth(c);
}

TEST_F(CachedGradientsTest, ExponentialsOfZeroHaveNoGradientExceptTheTargets) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  CachedCase c = MakeCachedCase(3, 600, 1);
  for (CachedRow& row : c.rows) {
    row.upstream = {.lse = 1, .logprob = 2, .entropy = 3};
    row.target = 192;
    std::fill(row.logits.begin() + 192, row.logits.begin() + 384, -kInfinity);  // a whole tile
    row.logits[5] = -kInfinity;
    row.logits[6] = -1'000.0F;
  }
  const std::vector<uint16_t> gradients = CachedRun(c).Run(ConstantsOf(c));

  for (size_t i = 0; i < c.rows.size(); ++i) {
    const auto at = [&](size_t column) {
      return testing::FromBits(gradients[i * 4 * kTileColumns + column], Dtype::kBf16);
    };
    EXPECT_EQ(at(5), 0.0F);
    EXPECT_EQ(at(6), 0.0F);
    for (size_t column = 193; column < 384; ++column) EXPECT_EQ(at(column), 0.0F);
    EXPECT_NEAR(at(192), 2 * kScale / c.rows[i].temperature, 0x1p-7);
  }
  ExpectTruth(c);
}

TEST_F(CachedGradientsTest, ANonfiniteRowDoesNotAffectOthers) {
  CachedCase c = MakeCachedCase(3, 400, 3);
  const std::vector<uint16_t> clean = CachedRun(c).Run(ConstantsOf(c));
  c.rows[1].logits[100] = std::numeric_limits<float>::quiet_NaN();

  const std::vector<uint16_t> gradients = CachedRun(c).Run(ConstantsOf(c));

  constexpr size_t kStride = 3 * kTileColumns;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (i / kStride == 1) {
      if (i % kStride < 400) {
        ASSERT_TRUE(std::isnan(testing::FromBits(gradients[i], Dtype::kBf16))) << i % kStride;
      }
    } else {
      ASSERT_EQ(gradients[i], clean[i]) << "row " << i / kStride;
    }
  }
}

TEST_F(CachedGradientsTest, ReadsEachRowFromItsCachedRow) {
  const CachedCase c = MakeCachedCase(7, 500, 3);
  const std::vector<RowGradient> all = ConstantsOf(c);
  const CachedRun run(c);
  const std::vector<uint16_t> truth = run.Run(all);
  const std::vector<int64_t> row_indices = {6, 0, 3, 3, 5};
  std::vector<RowGradient> rows;
  for (const int64_t index : row_indices) rows.push_back(all[static_cast<size_t>(index)]);

  const std::vector<uint16_t> gradients = run.Run(rows, {.cached_rows = row_indices});

  constexpr int64_t kStride = 3 * kTileColumns;
  for (size_t i = 0; i < row_indices.size(); ++i) {
    const auto own = gradients.begin() + static_cast<int64_t>(i) * kStride;
    EXPECT_TRUE(std::equal(own, own + kStride, truth.begin() + row_indices[i] * kStride))
        << "row " << i;
  }
}

TEST_F(CachedGradientsTest, RowsBeyondTheRowCountAreNotWritten) {
  const CachedCase c = MakeCachedCase(7, 500, 3);
  const std::vector<RowGradient> rows = ConstantsOf(c);
  const CachedRun run(c);
  const std::vector<uint16_t> all = run.Run(rows);
  constexpr int64_t kStride = 3 * kTileColumns;
  for (const int64_t count : {0, 1, 5, 7}) {
    const std::vector<uint16_t> some = run.Run(rows, {.row_count = count});

    const auto border = some.begin() + count * kStride;
    EXPECT_TRUE(std::equal(some.begin(), border, all.begin())) << count << " rows";
    EXPECT_TRUE(std::all_of(border, some.end(), [](uint16_t bits) { return bits == kPoison; }))
        << count << " rows";
  }
}

TEST_F(CachedGradientsTest, ARangeOfTilesHasTheBitsOfTheWholeAndWritesNothingElse) {
  const CachedCase c = MakeCachedCase(3, 20 * kTileColumns - 5, 3);
  const std::vector<RowGradient> rows = ConstantsOf(c);
  const CachedRun run(c);
  const std::vector<uint16_t> all = run.Run(rows);
  const int64_t all_stride = 20 * kTileColumns;
  const std::vector<std::vector<int64_t>> ranges = {{0, 1}, {2, 5}, {3, 20}, {19, 20}, {1, 18}};
  for (const std::vector<int64_t>& range : ranges) {
    const int64_t columns = (range[1] - range[0]) * kTileColumns;
    const int64_t stride = columns + 8;

    const std::vector<uint16_t> some =
        run.Run(rows, {.tile_begin = range[0], .tile_end = range[1], .more_stride = 8});

    for (int64_t i = 0; i < static_cast<int64_t>(some.size()); ++i) {
      const int64_t row = i / stride;
      const int64_t column = i % stride;
      const bool is_written = row < 3 && column < columns;
      const int64_t source = row * all_stride + range[0] * kTileColumns + column;
      ASSERT_EQ(some[static_cast<size_t>(i)],
                is_written ? all[static_cast<size_t>(source)] : kPoison)
          << "row " << row << ", column " << column << " of tiles from " << range[0];
    }
  }
}

// grid.y is at most 65,535. Further rows are in further planes of the grid, the last of which is
// partly filled.
TEST_F(CachedGradientsTest, WritesMoreRowsThanGridYHas) {
  const CachedCase c = MakeCachedCase(7, 100, 3);
  const std::vector<RowGradient> few = ConstantsOf(c);
  const CachedRun run(c);
  const std::vector<uint16_t> truth = run.Run(few);
  for (const int64_t num_rows : {65'535, 65'536, 131'071}) {
    std::vector<RowGradient> rows;
    std::vector<int64_t> row_indices;
    for (int64_t i = 0; i < num_rows; ++i) {
      row_indices.push_back(i % 7);
      rows.push_back(few[static_cast<size_t>(i % 7)]);
    }

    const std::vector<uint16_t> gradients = run.Run(rows, {.cached_rows = row_indices});

    for (int64_t i = 0; i < num_rows; ++i) {
      const auto own = gradients.begin() + i * kTileColumns;
      ASSERT_TRUE(std::equal(own, own + kTileColumns, truth.begin() + i % 7 * kTileColumns))
          << "row " << i << " of " << num_rows;
    }
    EXPECT_EQ(gradients[static_cast<size_t>(num_rows * kTileColumns)], kPoison);
  }
}

TEST_F(CachedGradientsTest, RefusesBrokenBounds) {
  const CachedCase c = MakeCachedCase(2, 500, 3);
  const CachedRun run(c);
  const DeviceArray<RowGradient> rows(ConstantsOf(c));
  const DeviceArray<uint16_t> gradients(std::vector<uint16_t>(size_t{3} * 3 * kTileColumns));
  const auto launch_with = [&](const auto& change) {
    CachedGradientsParams params = run.Params({});
    params.rows = rows.data();
    params.gradients = gradients.data();
    change(params);
    return LaunchCachedGradients(params, nullptr);
  };
  using Params = CachedGradientsParams;
  EXPECT_EQ(launch_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(LaunchCachedGradients({}, nullptr), cudaSuccess);  // no rows
  EXPECT_EQ(launch_with([](Params& p) { p.num_rows = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.num_rows = int64_t{1} << 31; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.exponentials = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.exponentials += 1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.exponents = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.rows = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.gradients = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.gradients = static_cast<uint16_t*>(p.gradients) + 4; }),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.tile_begin = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.tile_end = 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.tile_end = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.gradient_stride -= 8; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.gradient_stride += 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.dtype = Dtype::kF32; }), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::kernels
