#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/fused/fused_case.h"

namespace logprobd::testing {
namespace {

using kernels::FusedChoice;
using kernels::FusedRaster;
using kernels::FusedTile;

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> rows(static_cast<size_t>(end - begin));
  std::iota(rows.begin(), rows.end(), begin);
  return rows;
}

FusedScores Select(const FusedScores& all, const std::vector<int64_t>& rows) {
  FusedScores some;
  for (const int64_t row : rows) {
    const auto i = static_cast<size_t>(row);
    some.logprob.push_back(all.logprob[i]);
    some.entropy.push_back(all.entropy[i]);
    some.nonfinite.push_back(all.nonfinite[i]);
    some.lse.push_back(all.lse[i]);
    some.argmax_id.push_back(all.argmax_id[i]);
    some.argmax_logprob.push_back(all.argmax_logprob[i]);
    some.max_logit.push_back(all.max_logit[i]);
    some.min_logit.push_back(all.min_logit[i]);
    some.sum_p_squared.push_back(all.sum_p_squared[i]);
  }
  return some;
}

class FusedBitsTest : public FusedTest {};

TEST_F(FusedBitsTest, ARowHasTheSameBitsForAnyNumberAndOrderOfRows) {
  FusedCase all = MakeFusedCase({.rows = 8'192, .hidden = 896, .vocab = 2'000});
  for (size_t i = 0; i < all.temperatures.size(); ++i) {
    all.temperatures[i] = 0.5F + static_cast<float>(i % 7);
  }
  const FusedScores truth = RunFused(all);
  for (const int64_t count : {1, 7, 64, 77, 128, 200, 1'000}) {
    ExpectSameBits(RunFused(SelectRows(all, Range(3, 3 + count))),
                   Select(truth, Range(3, 3 + count)));
  }
  std::vector<int64_t> shuffled = Range(0, 8'192);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(5));
  ExpectSameBits(RunFused(SelectRows(all, shuffled)), Select(truth, shuffled));
}

TEST_F(FusedBitsTest, EveryInstanceAndOrderGivesTheSameBits) {
  for (const bool transforms : {false, true}) {
    for (const kernels::Dtype dtype : {kernels::Dtype::kBf16, kernels::Dtype::kF16}) {
      // The number of tiles is odd, so that one pair of column tiles has only one.
      FusedCase c = MakeFusedCase({.rows = 600, .hidden = 320, .vocab = 1'600, .dtype = dtype});
      if (transforms) {
        c.transform = {.scale = 0.5F, .softcap = 2.0F};  // both ways of Tanh
        c.bias.assign(1'600, 0.25F);
      }
      const FusedScores truth = RunFused(c);
      for (const FusedTile tile : TilesToTest()) {
        for (const FusedRaster raster : {FusedRaster::kAlongRows, FusedRaster::kAlongVocab}) {
          for (const int32_t swizzle : {1, 8}) {
            ExpectSameBits(RunFused(c, {.choice = FusedChoice{tile, raster, swizzle}}), truth);
          }
        }
      }
    }
  }
}

// The cap is computed in a shorter way where all logits of a warp are small.
TEST_F(FusedBitsTest, ACappedRowDoesNotDependOnItsNeighbours) {
  FusedCase all = MakeFusedCase({.rows = 600, .hidden = 320, .vocab = 1'500});
  all.transform = {.scale = 0.5F, .softcap = 5.0F};
  std::vector<int64_t> small;
  for (int64_t row = 0; row < all.num_rows; row += 3) {
    small.push_back(row);
    float* const hidden = &all.hidden[static_cast<size_t>(row * all.hidden_size)];
    for (int64_t k = 0; k < all.hidden_size; ++k) hidden[k] /= 16;
  }
  for (const FusedTile tile : TilesToTest()) {
    const FusedChoice choice = {tile, FusedRaster::kAlongRows, 1};
    ExpectSameBits(RunFused(SelectRows(all, small), {.choice = choice}),
                   Select(RunFused(all, {.choice = choice}), small));
  }
}

TEST_F(FusedBitsTest, EveryInstanceGivesTheSameBitsOfHardRows) {
  constexpr int64_t kRows = 300;
  constexpr int64_t kVocab = 1'500;
  enum class Transform { kNone, kMask, kCap };
  for (const Transform transform : {Transform::kNone, Transform::kMask, Transform::kCap}) {
    FusedCase c = MakeFusedCase(
        {.rows = kRows, .hidden = 200, .vocab = kVocab, .logit_stddev = 20, .is_f32 = true});
    c.entropy_temperatures.assign(kRows, 0.75F);
    for (int64_t row = 0; row < kRows; ++row) {
      float* const hidden = &c.hidden[static_cast<size_t>(row * c.hidden_size)];
      if (row % 50 == 3) hidden[7] = NAN;
      if (row % 50 == 20) hidden[0] = INFINITY;
      if (row % 50 == 31) std::fill(hidden, hidden + c.hidden_size, 0.0F);  // all logits are equal
      if (row % 50 == 40) c.temperatures[static_cast<size_t>(row)] = 1e-3F;
    }
    if (transform == Transform::kCap) c.transform.softcap = 15.0F;
    if (transform == Transform::kMask) {
      c.bias.assign(kVocab, 0.5F);
      for (size_t i = 0; i < c.bias.size(); i += 3) c.bias[i] = -INFINITY;
      std::fill(c.bias.begin() + 192, c.bias.begin() + 384, -INFINITY);  // a whole tile
    }
    const FusedScores truth = RunFused(c);
    EXPECT_EQ(truth.nonfinite[3], 1);
    EXPECT_EQ(truth.nonfinite[31], 0);
    for (const FusedTile tile : TilesToTest()) {
      ExpectSameBits(RunFused(c, {.choice = FusedChoice{tile, FusedRaster::kAlongRows, 1}}), truth);
    }
  }
}

TEST_F(FusedBitsTest, ARowCountInDeviceMemoryDoesNotChangeTheFirstRows) {
  constexpr int64_t kRows = 2'300;
  const FusedCase all = MakeFusedCase({.rows = kRows, .hidden = 320, .vocab = 1'500});
  const FusedScores truth = RunFused(all);
  FusedRun run(all);
  for (const FusedTile tile : TilesToTest()) {
    for (const FusedRaster raster : {FusedRaster::kAlongRows, FusedRaster::kAlongVocab}) {
      for (const int32_t swizzle : {1, 4, 8}) {
        for (const int64_t count : {1, 64, 65, 300, 513, 1'024, 1'300, 2'300}) {
          run.Enqueue({.choice = FusedChoice{tile, raster, swizzle}, .row_count = count});
          ExpectSameBits(Select(run.Read(), Range(0, count)), Select(truth, Range(0, count)));
        }
      }
    }
  }
}

// Computing the tiles of missing rows would take as long as computing other tiles.
TEST_F(FusedBitsTest, RowsBeyondTheRowCountAreNotComputed) {
  constexpr int64_t kRows = 2'048;
  const FusedCase c = MakeFusedCase({.rows = kRows, .hidden = 320, .vocab = 1'500});
  FusedRun run(c);
  for (const FusedTile tile : TilesToTest()) {
    for (const FusedRaster raster : {FusedRaster::kAlongRows, FusedRaster::kAlongVocab}) {
      for (const int64_t count : {0, 512, 1'536}) {
        const DeviceArray<int64_t> count_array(std::vector<int64_t>{count});
        const DeviceArray<float> target_logits(std::vector<float>(kRows, kPoison));
        kernels::FusedPartialsParams params = run.Partials();
        params.row_count = count_array.data();
        params.target_logits = target_logits.data();
        ASSERT_EQ(kernels::LaunchFusedPartialsAs(params, {tile, raster, 4}, run.stream()),
                  cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(run.stream()), cudaSuccess);
        const std::vector<float> targets = target_logits.Read();
        const int64_t cluster_rows = kernels::ClusterRows(tile);
        const int64_t computed = (count + cluster_rows - 1) / cluster_rows * cluster_rows;
        for (int64_t row = 0; row < kRows; ++row) {
          ASSERT_EQ(targets[static_cast<size_t>(row)] != kPoison, row < computed)
              << "row " << row << " of " << count;
        }
      }
    }
  }
}

// The kernel reads whole block tiles if the buffer has room, including rows of earlier batches.
TEST_F(FusedBitsTest, RowsAfterTheLastOneDoNotAffectTheResult) {
  for (const int64_t rows : {1, 65, 129, 1'100}) {
    const FusedCase c = MakeFusedCase({.rows = rows, .hidden = 320, .vocab = 1'500});
    const FusedScores truth = RunFused(c);
    FusedRun run(c, 2'048);
    for (const FusedTile tile : TilesToTest()) {
      run.Enqueue({.choice = FusedChoice{tile, FusedRaster::kAlongRows, 1}});
      ExpectSameBits(run.Read(), truth);
    }
  }
}

TEST_F(FusedBitsTest, OtherOutputsDoNotChangeTheBits) {
  for (const int64_t rows : {5, 100, 600}) {
    const FusedCase c = MakeFusedCase({.rows = rows, .hidden = 320, .vocab = 1'500});
    ExpectSameBits(RunFused(c, {.everything = false}), RunFused(c), false);
  }
}

TEST_F(FusedBitsTest, AThousandRunsNextToOtherKernelsGiveTheSameBits) {
  const FusedCase c = MakeFusedCase({.rows = 129, .hidden = 896, .vocab = 3'000});
  const FusedCase hog_case = MakeFusedCase({.rows = 1'300, .hidden = 896, .vocab = 3'000});
  const FusedScores truth = RunFused(c);
  FusedRun run(c);
  FusedRun hog(hog_case);
  for (int repeat = 0; repeat < 1'000; ++repeat) {
    hog.Enqueue({.everything = false});
    run.Enqueue();
    ExpectSameBits(run.Read(), truth);
    if (HasFailure()) break;
  }
  EXPECT_EQ(cudaStreamSynchronize(hog.stream()), cudaSuccess);
}

TEST_F(FusedBitsTest, EightHostThreadsCanLaunchConcurrently) {
  const FusedCase c = MakeFusedCase({.rows = 200, .hidden = 320, .vocab = 1'500});
  const FusedScores truth = RunFused(c);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      FusedRun run(c);
      for (int repeat = 0; repeat < 20; ++repeat) {
        run.Enqueue();
        ExpectSameBits(run.Read(), truth);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(FusedBitsTest, ACapturedGraphGivesTheSameBits) {
  const FusedCase c = MakeFusedCase({.rows = 40, .hidden = 320, .vocab = 1'500});
  const FusedScores truth = RunFused(c);
  FusedRun run(c);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(run.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  run.Enqueue();
  ASSERT_EQ(cudaStreamEndCapture(run.stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);

  ASSERT_EQ(cudaGraphLaunch(executable, run.stream()), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, run.stream()), cudaSuccess);

  ExpectSameBits(run.Read(), truth);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(FusedBitsTest, ASecondDeviceGivesTheSameBits) {
  int num_devices = 0;
  ASSERT_EQ(cudaGetDeviceCount(&num_devices), cudaSuccess);
  const FusedCase c = MakeFusedCase({.rows = 300, .hidden = 320, .vocab = 1'500});
  const FusedScores truth = RunFused(c);
  // With only one device, this is a second run on the same device.
  ASSERT_EQ(cudaSetDevice(num_devices - 1), cudaSuccess);
  ExpectSameBits(RunFused(c), truth);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::testing
