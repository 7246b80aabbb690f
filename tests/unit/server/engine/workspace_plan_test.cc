#include "server/engine/workspace_plan.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/tile.h"
#include "kernels/fused/top_k_scratch.h"

namespace logprobd {
namespace {

using kernels::Dtype;
using kernels::kTileColumns;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kF16, Dtype::kF32};

struct HeadCase {
  std::string name;
  int64_t vocab_size;
  int64_t hidden_size;
  Dtype dtype;
};

class WorkspacePlanTest : public ::testing::TestWithParam<HeadCase> {
 protected:
  static WorkspacePlanOptions Options(int64_t batch_rows_max) {
    WorkspacePlanOptions options;
    options.vocab_size = GetParam().vocab_size;
    options.hidden_size = GetParam().hidden_size;
    options.head_dtype = GetParam().dtype;
    options.batch_rows_max = batch_rows_max;
    return options;
  }
};

TEST_P(WorkspacePlanTest, WorkspaceStaysWithinItsBound) {
  for (const int64_t rows : {1, 64, 100, 4096, 8192, 32768, 150'000}) {
    for (const bool with_fused : {false, true}) {
      WorkspacePlanOptions options = Options(rows);
      options.with_fused = with_fused;
      EXPECT_LE(PlanWorkspace(options).workspace_bytes, 512 * kMiB) << rows;
    }
  }
}

TEST_P(WorkspacePlanTest, WorkspaceIsTheSumOfItsBuffers) {
  const WorkspacePlan plan = PlanWorkspace(Options(8192));

  EXPECT_EQ(plan.workspace_bytes, 2 * (plan.hidden_bytes + plan.slot_bytes) + plan.logits_bytes +
                                      plan.converted_weight_bytes + plan.partial_bytes +
                                      plan.row_state_bytes + plan.gemm_bytes);
}

TEST_P(WorkspacePlanTest, EveryBlockFitsItsBuffers) {
  const WorkspacePlan plan = PlanWorkspace(Options(8192));
  for (const Dtype dtype : kDtypes) {
    const int64_t block_rows = plan.BlockRows(dtype);
    ASSERT_GE(block_rows, kRowGranularity);
    EXPECT_EQ(block_rows % kRowGranularity, 0);
    EXPECT_LE(block_rows, plan.block_rows);
    EXPECT_GE(plan.MultipliedRowBytes(dtype), plan.padded_hidden * 2);
    EXPECT_LE(
        plan.HiddenRows(dtype) * (plan.MultipliedRowBytes(dtype) + plan.SourceRowBytes(dtype)),
        plan.hidden_bytes);
    EXPECT_LE(block_rows, plan.HiddenRows(dtype));
    EXPECT_LE(block_rows * plan.num_tiles * 32, plan.partial_bytes);
  }
}

TEST_P(WorkspacePlanTest, FusedBlocksFitTheArenaAndItsBound) {
  WorkspacePlanOptions options = Options(8192);
  options.with_fused = true;
  const WorkspacePlan plan = PlanWorkspace(options);
  EXPECT_LE(plan.arena_bytes + plan.row_state_bytes + plan.gemm_bytes, 64 * kMiB);
  EXPECT_GE(plan.arena_bytes, plan.partial_bytes + plan.logits_bytes + plan.converted_weight_bytes);
  for (const Dtype dtype : kDtypes) {
    for (const int num_sums : {1, 2}) {
      for (const int32_t top_k : {0, 1, 20, 128}) {
        const int64_t rows = plan.FusedRows(dtype, num_sums, top_k);
        ASSERT_GE(rows, kRowGranularity);
        EXPECT_EQ(rows % kRowGranularity, 0);
        EXPECT_LE(rows, plan.HiddenRows(dtype));
        EXPECT_LE(rows, plan.row_state_rows);
        const int64_t tile_bytes = num_sums * 16 + (top_k > 0 ? 4 : 0);
        EXPECT_LE(WorkspacePlan::TopKKeyBytes(rows, top_k) + rows * plan.num_tiles * tile_bytes,
                  plan.arena_bytes);
        // Regression: with a vocabulary of 192, the arena had no room for the top-k search, and the
        // engine failed.
        if (top_k > 0) {
          EXPECT_LE(WorkspacePlan::TopKKeyBytes(rows, top_k) +
                        kernels::TopKScratchOf(1, top_k, plan.num_tiles).size_bytes,
                    plan.arena_bytes);
        }
        // A search of a part of the rows reads the weight once more.
        if (top_k == 20 && plan.num_tiles >= 128) {
          EXPECT_LE(WorkspacePlan::TopKKeyBytes(rows, top_k) +
                        kernels::TopKScratchOf(rows, top_k, plan.num_tiles).size_bytes,
                    plan.arena_bytes);
        }
      }
    }
  }
}

TEST(PlanWorkspaceTest, FusedLaunchTakesFiveThousandRowsOfALargeVocabulary) {
  const WorkspacePlan plan =
      PlanWorkspace({.vocab_size = 152'064, .hidden_size = 3'584, .with_fused = true});
  EXPECT_EQ(plan.FusedRows(Dtype::kBf16, 1, 0), 5'120);
  EXPECT_EQ(plan.FusedRows(Dtype::kBf16, 1, 20), 4'096);
  EXPECT_EQ(plan.FusedRows(Dtype::kBf16, 2, 0), 2'560);
}

// Regression: 4,200 rows were scored in blocks of 4,096 and 104 rows, and the second block read the
// whole weight again.
TEST(PlanWorkspaceTest, BlocksOfABatchHaveAboutTheSameSize) {
  EXPECT_EQ(EvenBlockRows(4'200, 5'120), 4'352);
  EXPECT_EQ(EvenBlockRows(5'200, 5'120), 2'816);
  EXPECT_EQ(EvenBlockRows(8'192, 5'120), 4'096);
  EXPECT_EQ(EvenBlockRows(6'144, 2'560), 2'048);
  EXPECT_EQ(EvenBlockRows(513, 512), 320);
  EXPECT_EQ(EvenBlockRows(1'025, 512), 384);
  EXPECT_EQ(EvenBlockRows(130, 128), 128);
  // Regression: blocks of 2,368 rows, which were computed as 2,560, took 1.08 of the time.
  EXPECT_EQ(EvenBlockRows(16'384, 2'560), 2'560);
  for (const int64_t rows_max : {64, 192, 448, 512, 2'560}) {
    for (int64_t rows = 1; rows <= 6'000; rows += 37) {
      const int64_t block_rows = EvenBlockRows(rows, rows_max);
      EXPECT_LE(block_rows, rows_max) << rows;
      EXPECT_EQ(block_rows % kRowGranularity, 0) << rows;
      const int64_t num_blocks = (rows + block_rows - 1) / block_rows;
      EXPECT_EQ(num_blocks, (rows + rows_max - 1) / rows_max) << rows;
      if (num_blocks == 1) continue;
      // Rounding up adds less than kRowGranularity rows to each of the other blocks.
      const int64_t last = rows - (num_blocks - 1) * block_rows;
      EXPECT_GE(last,
                std::min({block_rows / 2, block_rows - num_blocks * kRowGranularity, int64_t{512}}))
          << rows << " rows, at most " << rows_max;
    }
  }
}

TEST_P(WorkspacePlanTest, EveryChunkFitsItsBuffers) {
  const WorkspacePlan plan = PlanWorkspace(Options(8192));
  for (const Dtype dtype : kDtypes) {
    for (int64_t rows = 1; rows <= plan.BlockRows(dtype); rows += 63) {
      const int64_t tiles = plan.ChunkTiles(dtype, rows);
      ASSERT_GE(tiles, 1);
      ASSERT_LE(tiles, plan.num_tiles);
      ASSERT_LE(tiles * kTileColumns * PadRows(rows) * 4, plan.logits_bytes);
      if (plan.ProductFormOf(dtype) != ProductForm::kNative && plan.head_dtype != Dtype::kF32) {
        ASSERT_LE(tiles * kTileColumns * plan.MultipliedRowBytes(dtype),
                  plan.converted_weight_bytes);
      }
    }
  }
}

TEST_P(WorkspacePlanTest, PaddedRowIsAMultipleOf16Bytes) {
  const WorkspacePlan plan = PlanWorkspace(Options(64));

  EXPECT_GE(plan.padded_hidden, plan.hidden_size);
  EXPECT_EQ(plan.padded_hidden * 2 % 16, 0);
  EXPECT_GE(plan.num_tiles * kTileColumns, plan.vocab_size);
  EXPECT_EQ(plan.weight_bytes(), plan.num_tiles * kTileColumns * plan.padded_hidden *
                                     kernels::DtypeBytes(plan.head_dtype));
}

INSTANTIATE_TEST_SUITE_P(Heads, WorkspacePlanTest,
                         ::testing::Values(HeadCase{"Qwen3Of8B", 151'936, 4'096, Dtype::kBf16},
                                           HeadCase{"LlamaOf70B", 128'256, 8'192, Dtype::kBf16},
                                           HeadCase{"Gemma27B", 262'208, 5'376, Dtype::kBf16},
                                           HeadCase{"SmallHidden", 151'936, 896, Dtype::kF16},
                                           HeadCase{"WideHidden", 128'256, 16'384, Dtype::kBf16},
                                           HeadCase{"Float32", 50'257, 768, Dtype::kF32},
                                           HeadCase{"LargestVocabulary", int64_t{1} << 20, 4'096,
                                                    Dtype::kF32},
                                           HeadCase{"OneColumn", 1, 1, Dtype::kBf16},
                                           HeadCase{"OneTile", 192, 64, Dtype::kBf16},
                                           HeadCase{"OddSizes", 1'003, 77, Dtype::kF16}),
                         [](const auto& info) { return info.param.name; });

TEST(PlanWorkspaceTest, IsTheSameForTheSameHeadAndLimits) {
  const WorkspacePlanOptions options = {.vocab_size = 151'936, .hidden_size = 4'096};

  EXPECT_EQ(PlanWorkspace(options).workspace_bytes, PlanWorkspace(options).workspace_bytes);
}

TEST(PlanWorkspaceTest, SmallBatchTakesTheWholeVocabularyInOneChunk) {
  const WorkspacePlan plan = PlanWorkspace({.vocab_size = 151'936, .hidden_size = 4'096});

  EXPECT_EQ(plan.ChunkTiles(Dtype::kBf16, 1), plan.num_tiles);
  EXPECT_EQ(plan.ChunkTiles(Dtype::kBf16, 64), plan.num_tiles);
}

TEST(PlanWorkspaceTest, ChunksOfALargeBlockFillTheLastWaveOfBlocks) {
  const WorkspacePlan plan =
      PlanWorkspace({.vocab_size = 151'936, .hidden_size = 4'096, .num_sms = 132});
  const int64_t rows = plan.BlockRows(Dtype::kBf16);

  const int64_t tiles = plan.ChunkTiles(Dtype::kBf16, rows);

  const int64_t blocks = (tiles * kTileColumns + 255) / 256 * (rows / 128);
  EXPECT_EQ(blocks % 132, 0) << tiles << " tiles, " << blocks << " blocks";
}

TEST(PlanWorkspaceTest, TightBoundGivesSmallerBlocks) {
  const WorkspacePlan plan = PlanWorkspace(
      {.vocab_size = 151'936, .hidden_size = 4'096, .workspace_bytes_max = 200 * kMiB});

  EXPECT_LE(plan.workspace_bytes, 200 * kMiB);
  EXPECT_LT(plan.block_rows, 2'048);
}

}  // namespace
}  // namespace logprobd
