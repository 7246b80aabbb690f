#include <malloc.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>

#include "gtest/gtest.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/row_scorer.h"

namespace logprobd::kernels {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// Returns a head without a weight, which is not read before rows are scored.
CpuHead HeadOf(int64_t hidden_size, int64_t vocab_size, Dtype dtype = Dtype::kBf16,
               bool is_strided = false) {
  static const std::byte weight{};
  CpuHead head = {.dtype = dtype,
                  .hidden_size = hidden_size,
                  .vocab_size = vocab_size,
                  .tile_end = NumTiles(vocab_size),
                  .transform = {}};
  if (is_strided) head.strided_weight = {&weight, hidden_size};
  return head;
}

TEST(RowWorkspaceTest, StaysBelow64MiB) {
  for (const int32_t num_threads : {1, 2, 16, 64, 256}) {
    for (const int64_t hidden_size : {1, 1'024, 65'536}) {
      for (const int64_t vocab_size : {1, 151'936, 1 << 20}) {
        for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) {
          for (const int32_t num_shards : {1, 8}) {
            for (const bool is_strided : {false, true}) {
              const CpuHead head = HeadOf(hidden_size, vocab_size, dtype, is_strided);
              const int64_t bytes = RowScorer::WorkspaceBytes(
                  head, {.num_threads = num_threads, .num_shards = num_shards});

              EXPECT_LT(bytes, 64 * kMiB)
                  << num_threads << " threads, hidden size " << hidden_size << ", vocabulary "
                  << vocab_size << ", " << num_shards << " shards, strided " << is_strided;
            }
          }
        }
      }
    }
  }
}

/// Has threads that never run.
class NoThreads : public LoopThreads {
 public:
  explicit NoThreads(int32_t num_threads) : num_threads_(num_threads) {}
  int32_t num_threads() const override { return num_threads_; }
  void ForEach(int64_t, const std::function<void(int64_t, int32_t)>&) override {}

 private:
  const int32_t num_threads_;
};

int64_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

TEST(RowWorkspaceTest, HasTheBytesThatAreStated) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers have a heap of their own";
#endif
  struct Workspace {
    CpuHead head;
    RowScorer::Options options;
  };
  const Workspace workspaces[] = {
      {HeadOf(1'024, 5'000), {.num_threads = 4}},
      {HeadOf(1'024, 5'000, Dtype::kF32, /*is_strided=*/true), {.num_threads = 4}},
      {HeadOf(64, 1'000), {.num_threads = 64, .top_k_max = 1}},
      {HeadOf(64, 100'000), {.top_k_max = 0}},
      {HeadOf(64, 1'000), {.num_shards = 8}},
      {HeadOf(64, 1'000), {.top_k_max = 1, .num_shards = 8}},
      {HeadOf(64, 1'000), {.num_tiles_max = 2'000}}};
  for (size_t i = 0; i < std::size(workspaces); ++i) {
    SCOPED_TRACE(::testing::Message() << "workspace " << i);
    const auto& [head, options] = workspaces[i];
    NoThreads threads(options.num_threads);
    const int64_t before = HeapBytes();

    const RowScorer scorer(head, options, threads);

    const int64_t stated = RowScorer::WorkspaceBytes(head, options);
    EXPECT_NEAR(static_cast<double>(HeapBytes() - before), static_cast<double>(stated),
                0.005 * static_cast<double>(stated) + 100'000);
  }
}

TEST(RowWorkspaceTest, ASmallBatchIsScoredInOneStep) {
  NoThreads threads(2);
  const CpuHead head = HeadOf(1'024, 151'936);
  for (const int64_t batch_rows_max : {1, 15, 16, 17, 240, 256}) {
    const RowScorer scorer(head, {.num_threads = 2, .batch_rows_max = batch_rows_max}, threads);

    EXPECT_GE(scorer.step_rows(), batch_rows_max);
    EXPECT_LT(scorer.step_rows(), batch_rows_max + 16);
  }
}

TEST(RowWorkspaceTest, HasABlockOfRowsHoweverLargeARowIs) {
  const int64_t vocab_size = int64_t{1} << 26;
  constexpr int64_t kSumsBytes = 2 * 16;  // of a tile: two sets, of at least four floats each

  EXPECT_GT(RowScorer::WorkspaceBytes(HeadOf(64, vocab_size), {}),
            16 * NumTiles(vocab_size) * kSumsBytes);
}

TEST(RowWorkspaceTest, EveryShardHasTheStepsOfTheLargest) {
  NoThreads threads(1);
  CpuHead small = HeadOf(64, 1 << 20);
  CpuHead large = small;
  small.tile_end = 100;
  large.tile_begin = 100;
  const RowScorer::Options alone = {.num_shards = 2};
  RowScorer::Options options = alone;
  options.num_tiles_max = large.tile_end - large.tile_begin;

  const int64_t step_rows = RowScorer(small, options, threads).step_rows();

  EXPECT_EQ(step_rows, RowScorer(large, options, threads).step_rows());
  EXPECT_EQ(step_rows, RowScorer(large, alone, threads).step_rows());
  EXPECT_GT(RowScorer(small, alone, threads).step_rows(), step_rows);
}

}  // namespace
}  // namespace logprobd::kernels
