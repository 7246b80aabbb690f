#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/fused/listed_logits.h"
#include "tests/unit/kernels/fused/fused_case.h"

namespace logprobd::testing {
namespace {

class ListedLogitsTest : public FusedTest {};

/// Lists each row with its own target.
FusedRun::Listed Targets(const FusedCase& c) {
  FusedRun::Listed listed;
  for (int64_t row = 0; row < c.num_rows; ++row) {
    listed.rows.push_back(static_cast<int32_t>(row));
    listed.ids.push_back(c.targets[static_cast<size_t>(row)]);
  }
  return listed;
}

// mma.sync and wgmma are different instructions; this test verifies that they round in the same
// way.
TEST_F(ListedLogitsTest, HaveTheBitsOfTheFusedKernel) {
  for (const int64_t hidden : {1, 8, 16, 31, 70, 123, 896, 2'880, 4'095}) {
    for (const double stddev : {3.0, 20.0}) {
      for (const kernels::Dtype dtype : {kernels::Dtype::kBf16, kernels::Dtype::kF16}) {
        const FusedCase c = MakeFusedCase({.rows = 100,
                                           .hidden = hidden,
                                           .vocab = 1'000,
                                           .logit_stddev = stddev,
                                           .dtype = dtype});
        FusedRun run(c);
        EXPECT_EQ(run.ListedLogits(Targets(c)), run.TargetLogits()) << "hidden size " << hidden;
      }
    }
  }
}

TEST_F(ListedLogitsTest, HaveTheBitsOfTheFusedKernelForSplitsAndTransforms) {
  FusedCase c = MakeFusedCase({.rows = 100, .hidden = 200, .vocab = 1'000, .is_f32 = true});
  c.transform = {.scale = 0.5F, .softcap = 20.0F};
  c.bias.assign(1'000, 0.25F);
  FusedRun run(c);

  EXPECT_EQ(run.ListedLogits(Targets(c)), run.TargetLogits());
}

TEST_F(ListedLogitsTest, PairsOfOtherRowsAreNotWritten) {
  const FusedCase c = MakeFusedCase({.rows = 4, .hidden = 64, .vocab = 500});
  FusedRun run(c);
  const std::vector<float> all =
      run.ListedLogits({.rows = {0, 1, 2, 3, 3, 0}, .ids = {5, 499, 192, 191, 0, 7}});

  const std::vector<float> some = run.ListedLogits(
      {.rows = {9, 10, 11, 12, 13, 14, 10}, .ids = {5, 5, 499, 192, 191, 0, 7}, .row_begin = 10});

  EXPECT_EQ(some, (std::vector<float>{kPoison, all[0], all[1], all[2], all[3], kPoison, all[5]}));
}

TEST_F(ListedLogitsTest, IdsOfOtherTilesAreNotWritten) {
  FusedCase c = MakeFusedCase({.rows = 2, .hidden = 64, .vocab = 700});
  c.bias.assign(700, 0.0F);
  c.bias[200] = 3.0F;
  FusedRun run(c);
  const FusedRun::Listed listed = {.rows = {0, 0, 1, 1, 0}, .ids = {191, 192, 200, 383, 384}};
  const std::vector<float> all = run.ListedLogits(listed);
  FusedRun::Listed of_second_tile = listed;
  of_second_tile.tiles = {1, 2};

  const std::vector<float> second_tile = run.ListedLogits(of_second_tile);

  EXPECT_EQ(second_tile, (std::vector<float>{kPoison, all[1], all[2], all[3], kPoison}));
}

TEST_F(ListedLogitsTest, RefusesBrokenBounds) {
  const FusedCase c = MakeFusedCase({.rows = 2, .hidden = 64, .vocab = 400});
  FusedRun run(c);
  const DeviceArray<int32_t> ids(std::vector<int32_t>{0});
  const DeviceArray<float> logits(std::vector<float>{0});
  kernels::ListedLogitsParams good;
  good.partials = run.Partials();
  good.rows = ids.data();
  good.ids = ids.data();
  good.count = 1;
  good.logits = logits.data();
  const auto launch_with = [&](const auto& change) {
    kernels::ListedLogitsParams params = good;
    change(params);
    return LaunchListed(params, run.stream());
  };
  using Params = kernels::ListedLogitsParams;
  EXPECT_EQ(launch_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(launch_with([](Params& p) { p.count = 0; }), cudaSuccess);
  EXPECT_EQ(launch_with([](Params& p) { p.count = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.ids = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.partials.hidden_stride = 63; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with(
                [](Params& p) { p.partials.row_count = reinterpret_cast<const int64_t*>(p.ids); }),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.partials.num_splits = 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.partials.dtype = kernels::Dtype::kF32; }),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaStreamSynchronize(run.stream()), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::testing
