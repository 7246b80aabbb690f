#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/tile.h"
#include "kernels/fused/top_k.h"
#include "kernels/fused/top_k_scratch.h"
#include "tests/unit/kernels/fused/fused_case.h"

namespace logprobd::testing {
namespace {

/// Returns every logit of `row`, bit-identical to the logits of the fused kernel.
std::vector<float> AllLogits(FusedRun& run, const FusedCase& c, int64_t row) {
  FusedRun::Listed listed;
  listed.rows.assign(static_cast<size_t>(c.vocab_size), static_cast<int32_t>(row));
  listed.ids.resize(static_cast<size_t>(c.vocab_size));
  std::iota(listed.ids.begin(), listed.ids.end(), 0);
  return run.ListedLogits(listed);
}

std::vector<uint64_t> BestOf(const std::vector<float>& logits, int32_t top_k) {
  std::vector<uint64_t> keys;
  for (size_t id = 0; id < logits.size(); ++id) {
    keys.push_back(kernels::LogitKey(logits[id], static_cast<int32_t>(id)));
  }
  std::sort(keys.begin(), keys.end(), std::greater<>());
  keys.resize(static_cast<size_t>(top_k));
  return keys;
}

int64_t ScratchBytes(const FusedCase& c, int64_t rows, int32_t top_k) {
  return kernels::TopKScratchOf(rows, top_k, kernels::NumTiles(c.vocab_size)).size_bytes;
}

/// Compares the lists of some rows with a sort of all their logits.
void ExpectBest(const FusedCase& c, int32_t top_k, int64_t workspace_rows = 1 << 20) {
  FusedRun run(c);
  const int64_t bytes = ScratchBytes(c, std::min(workspace_rows, c.num_rows), top_k);
  const std::vector<uint64_t> keys = run.TopK(top_k, bytes);
  const int64_t step = std::max<int64_t>(1, c.num_rows / 7);
  for (int64_t row = 0; row < c.num_rows; row += step) {
    const auto begin = keys.begin() + row * top_k;
    EXPECT_EQ(std::vector<uint64_t>(begin, begin + top_k), BestOf(AllLogits(run, c, row), top_k))
        << "row " << row << " of " << c.num_rows << ", vocabulary " << c.vocab_size << ", k "
        << top_k;
  }
}

class FusedTopKTest : public FusedTest {};

TEST_F(FusedTopKTest, FindsTheBestForAnyNumberOfRowsAndAnyK) {
  for (const int64_t rows : {1, 7, 64, 65, 129, 600, 1'300}) {
    const FusedCase c = MakeFusedCase({.rows = rows, .hidden = 128, .vocab = 5'000});
    for (const int32_t top_k : {1, 5, 20, 128}) ExpectBest(c, top_k);
  }
}

TEST_F(FusedTopKTest, FindsTheBestForAnyVocabularyAndHiddenSize) {
  for (const int64_t vocab : {1, 64, 191, 192, 193, 383, 1'000, 30'001}) {
    for (const int64_t hidden : {1, 31, 70, 896}) {
      const FusedCase c = MakeFusedCase({.rows = 9, .hidden = hidden, .vocab = vocab});
      for (const int32_t top_k : {1, 20}) ExpectBest(c, top_k);
    }
  }
}

TEST_F(FusedTopKTest, FindsTheBestForAnyDtypeAndTransform) {
  for (const bool is_f32 : {false, true}) {
    for (const kernels::Dtype dtype : {kernels::Dtype::kBf16, kernels::Dtype::kF16}) {
      if (is_f32 && dtype == kernels::Dtype::kF16)
        continue;  // fp32 rows are not split for an fp16 head
      FusedCase c = MakeFusedCase(
          {.rows = 200, .hidden = 200, .vocab = 3'000, .dtype = dtype, .is_f32 = is_f32});
      ExpectBest(c, 20);
      c.transform = {.scale = 0.5F, .softcap = 20.0F};
      for (int64_t id = 0; id < c.vocab_size; ++id) {
        c.bias.push_back(static_cast<float>(id % 13) * 0.25F);
      }
      ExpectBest(c, 20);
    }
  }
}

// The k best logits of a row of zeros are its first ones, although all tiles have the same maximum.
TEST_F(FusedTopKTest, EqualLogitsGoToTheLowestIds) {
  FusedCase c = MakeFusedCase({.rows = 70, .hidden = 64, .vocab = 2'000});
  std::fill(c.hidden.begin(), c.hidden.end(), 0.0F);
  for (const int32_t top_k : {1, 20, 128}) ExpectBest(c, top_k);
}

TEST_F(FusedTopKTest, OneTileCanHoldTheWholeList) {
  FusedCase c = MakeFusedCase({.rows = 70, .hidden = 64, .vocab = 4'000});
  c.bias.assign(4'000, 0.0F);
  std::fill(c.bias.begin() + 5 * kernels::kTileColumns, c.bias.begin() + 6 * kernels::kTileColumns,
            100.0F);
  ExpectBest(c, 128);
}

// Far more logits than the list has entries are equal to the smallest of the tiles' maxima.
TEST_F(FusedTopKTest, EqualLogitsOfAnyTileGoToTheLowestIds) {
  FusedCase c = MakeFusedCase({.rows = 70, .hidden = 64, .vocab = 5'000});
  std::fill(c.hidden.begin(), c.hidden.end(), 0.0F);
  c.bias.assign(5'000, 0.0F);
  for (size_t id = 0; id < c.bias.size(); ++id) {
    const size_t tile = id / kernels::kTileColumns;
    c.bias[id] = static_cast<float>((id * 7 + tile) % 3) + (tile == 11 ? 1.0F : 0.0F);
  }
  for (const int32_t top_k : {1, 5, 20, 128}) ExpectBest(c, top_k);
}

// Columns beyond the vocabulary, whose dot products are 0, would exceed all logits.
TEST_F(FusedTopKTest, ListsNoColumnBeyondTheVocabulary) {
  for (const int64_t vocab : {1, 193, 385, 4'993}) {
    FusedCase c = MakeFusedCase({.rows = 9, .hidden = 64, .vocab = vocab});
    std::fill(c.hidden.begin(), c.hidden.end(), 1.0F);
    std::fill(c.weight.begin(), c.weight.end(), -1.0F);
    for (const int32_t top_k : {1, 20, 128}) ExpectBest(c, top_k);
  }
}

TEST_F(FusedTopKTest, LogitsOfMinusInfinityComeLast) {
  FusedCase c = MakeFusedCase({.rows = 5, .hidden = 64, .vocab = 1'000});
  c.bias.assign(1'000, -std::numeric_limits<float>::infinity());
  for (const size_t id : {3, 500, 999}) c.bias[id] = 0.0F;
  for (const int32_t top_k : {1, 5, 20, 128}) ExpectBest(c, top_k);
}

TEST_F(FusedTopKTest, ANonfiniteRowDoesNotAffectOthers) {
  FusedCase c = MakeFusedCase({.rows = 8, .hidden = 64, .vocab = 1'000});
  const FusedCase healthy = c;
  const int64_t bytes = ScratchBytes(c, 8, 5);
  FusedRun healthy_run(healthy);
  const std::vector<uint64_t> truth = healthy_run.TopK(5, bytes);
  c.hidden[3 * 64] = std::numeric_limits<float>::quiet_NaN();
  FusedRun run(c);

  const std::vector<uint64_t> keys = run.TopK(5, bytes);

  for (size_t i = 0; i < keys.size(); ++i) {
    if (i / 5 == 3) continue;
    EXPECT_EQ(keys[i], truth[i]) << "row " << i / 5;
  }
}

TEST_F(FusedTopKTest, ScratchForFewRowsGivesTheSameLists) {
  const FusedCase c = MakeFusedCase({.rows = 300, .hidden = 128, .vocab = 3'000});
  for (const int64_t rows : {1, 7, 100, 299}) ExpectBest(c, 20, rows);
}

TEST_F(FusedTopKTest, FindsTheBestAmongMoreTilesThanABlockHasThreads) {
  for (const int64_t vocab : {200'000, 1 << 20}) {
    const FusedCase c = MakeFusedCase({.rows = 3, .hidden = 8, .vocab = vocab});
    for (const int32_t top_k : {20, 128}) ExpectBest(c, top_k);
  }
}

TEST_F(FusedTopKTest, AListIsTheSameForAnyNumberOfRows) {
  const FusedCase all = MakeFusedCase({.rows = 1'300, .hidden = 320, .vocab = 3'000});
  constexpr int32_t kTopK = 20;
  FusedRun whole(all);
  const std::vector<uint64_t> truth = whole.TopK(kTopK, ScratchBytes(all, 1'300, kTopK));
  for (const int64_t count : {1, 7, 64, 77, 200, 1'000}) {
    std::vector<int64_t> rows(static_cast<size_t>(count));
    std::iota(rows.begin(), rows.end(), 3);
    const FusedCase some = SelectRows(all, rows);
    FusedRun run(some);
    const auto begin = truth.begin() + 3 * kTopK;
    EXPECT_EQ(run.TopK(kTopK, ScratchBytes(some, count, kTopK)),
              std::vector<uint64_t>(begin, begin + count * kTopK))
        << count << " rows";
  }
}

TEST_F(FusedTopKTest, RefusesBrokenBounds) {
  const FusedCase c = MakeFusedCase({.rows = 2, .hidden = 64, .vocab = 400});
  FusedRun run(c);
  const DeviceArray<float> tile_max(std::vector<float>(6));
  const DeviceArray<uint64_t> keys(std::vector<uint64_t>(10));
  const DeviceArray<float> workspace(std::vector<float>(1 << 16));
  kernels::FusedTopKParams good;
  good.partials = run.Partials();
  good.partials.tile_max = tile_max.data();
  good.top_k = 5;
  good.keys = keys.data();
  good.workspace = reinterpret_cast<std::byte*>(workspace.data());
  good.workspace_bytes = ScratchBytes(c, 1, 5);
  const auto launch_with = [&](const auto& change) {
    kernels::FusedTopKParams params = good;
    change(params);
    return LaunchTopK(params, run.stream());
  };
  using Params = kernels::FusedTopKParams;
  EXPECT_EQ(launch_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(launch_with([](Params& p) { p.partials.num_rows = 0; }), cudaSuccess);
  EXPECT_EQ(launch_with([](Params& p) { p.partials.num_rows = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.partials.tile_max = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.partials.dtype = kernels::Dtype::kF32; }),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.partials.weight = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) {
              p.partials.row_count = reinterpret_cast<const int64_t*>(p.workspace);
            }),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.top_k = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.top_k = 129; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.keys = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.workspace = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.workspace += 16; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.workspace_bytes -= 1; }), cudaErrorInvalidValue);
  EXPECT_EQ(cudaStreamSynchronize(run.stream()), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::testing
