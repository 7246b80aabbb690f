#include "client/cpp/chunk_plan.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/client/cpp/score_case.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::Le;
using ::testing::Pair;

constexpr int64_t kManyBytes = int64_t{1} << 30;

std::vector<std::pair<int64_t, int64_t>> RowRanges(const ChunkPlan& plan) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const Chunk& chunk : plan.chunks) ranges.emplace_back(chunk.row_begin, chunk.row_end);
  return ranges;
}

TEST(ChunkPlanTest, DoesNotCutASmallCall) {
  const ScoreCase c(10);

  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);

  EXPECT_THAT(RowRanges(plan), ElementsAre(Pair(0, 10)));
}

TEST(ChunkPlanTest, SendsOneEmptyRequestForNoRows) {
  const ScoreCase c(0);

  EXPECT_THAT(RowRanges(PlanChunks(c.args, {}, kManyBytes)), ElementsAre(Pair(0, 0)));
}

TEST(ChunkPlanTest, CutsAtTheServersRowLimit) {
  const ScoreCase c(10);

  const ChunkPlan plan = PlanChunks(c.args, {.request_rows_max = 4}, kManyBytes);

  EXPECT_THAT(RowRanges(plan), ElementsAre(Pair(0, 4), Pair(4, 8), Pair(8, 10)));
}

TEST(ChunkPlanTest, CutsAtTheServersMessageLimit) {
  const ScoreCase c(10);

  // 1,024 bytes are reserved for other fields; a row takes 16 + 4 bytes.
  const ChunkPlan plan = PlanChunks(c.args, {.message_bytes_max = 1024 + 69}, kManyBytes);

  EXPECT_THAT(RowRanges(plan), ElementsAre(Pair(0, 3), Pair(3, 6), Pair(6, 9), Pair(9, 10)));
}

TEST(ChunkPlanTest, CutsAtTheTargetRequestSize) {
  const ScoreCase c(300);

  const ChunkPlan plan = PlanChunks(c.args, {}, 4000);

  EXPECT_THAT(RowRanges(plan), ElementsAre(Pair(0, 150), Pair(150, 300)));
}

// Regression: all fields counted towards the size, so 8 MiB held 1,023 rows of 8 KiB. A call of
// 8,192 rows then needed nine requests, one more than are in flight, so concurrent calls ended
// together and left the server idle.
TEST(ChunkPlanTest, ARequestHoldsAllRowsThatFitItsTargetSize) {
  const ScoreCase c(1'024);

  const ChunkPlan plan = PlanChunks(c.args, {}, 16 * 256);  // a row has 16 bytes

  EXPECT_THAT(RowRanges(plan),
              ElementsAre(Pair(0, 256), Pair(256, 512), Pair(512, 768), Pair(768, 1'024)));
}

// Regression: the size of segments and candidates caused a last request of only a few rows.
TEST(ChunkPlanTest, SegmentsAndCandidatesLeaveNoShortLastChunk) {
  ScoreCase c(1'024);
  c.segment_offsets = {0, 1'024};
  c.args.segment_offsets = c.segment_offsets;
  EXPECT_THAT(RowRanges(PlanChunks(c.args, {}, 16 * 512)),
              ElementsAre(Pair(0, 512), Pair(512, 1'024)));

  for (uint32_t row = 0; row <= 1'024; ++row) c.candidate_offsets.push_back(4 * row);
  c.candidate_ids.assign(4 * 1'024, 1);
  c.args.candidate_ids = c.candidate_ids;
  c.args.candidate_offsets = c.candidate_offsets;
  EXPECT_THAT(RowRanges(PlanChunks(c.args, {}, 16 * 1'000)),
              ElementsAre(Pair(0, 342), Pair(342, 684), Pair(684, 1'024)));
}

TEST(ChunkPlanTest, CandidatesCountTowardsTheTargetSize) {
  ScoreCase c(4);
  c.candidate_ids = {1, 2, 3, 4};
  c.candidate_offsets = {0, 4, 4, 4, 4};
  c.args.candidate_ids = c.candidate_ids;
  c.args.candidate_offsets = c.candidate_offsets;

  EXPECT_THAT(RowRanges(PlanChunks(c.args, {}, 40)),
              ElementsAre(Pair(0, 1), Pair(1, 3), Pair(3, 4)));
}

// Regression: the server treated a last chunk of a few rows as a small request and formed batches
// of a quarter of the size.
TEST(ChunkPlanTest, ChunksOfALongCallAreAboutEqual) {
  const ScoreCase c(8'192);

  const ChunkPlan plan = PlanChunks(c.args, {.request_rows_max = 1'023}, kManyBytes);

  EXPECT_EQ(plan.chunks.size(), 9U);
  for (const Chunk& chunk : plan.chunks) EXPECT_THAT(chunk.rows(), AllOf(Ge(904), Le(911)));
}

TEST(ChunkPlanTest, CutsBeforeTheCandidateLimit) {
  ScoreCase c(4);
  c.candidate_ids = {1, 2, 3, 4, 5, 6};
  c.candidate_offsets = {0, 2, 2, 5, 6};
  c.args.candidate_ids = c.candidate_ids;
  c.args.candidate_offsets = c.candidate_offsets;

  const ChunkPlan plan = PlanChunks(c.args, {.candidates_max = 3}, kManyBytes);

  ASSERT_THAT(RowRanges(plan), ElementsAre(Pair(0, 2), Pair(2, 3), Pair(3, 4)));
  EXPECT_EQ(plan.chunks[1].candidate_begin, 2);
  EXPECT_EQ(plan.chunks[1].candidate_end, 5);
}

TEST(ChunkPlanTest, GivesARowBeyondEveryLimitARequestOfItsOwn) {
  const ScoreCase c(3);

  const ChunkPlan plan = PlanChunks(c.args, {.message_bytes_max = 1}, kManyBytes);

  EXPECT_THAT(RowRanges(plan), ElementsAre(Pair(0, 1), Pair(1, 2), Pair(2, 3)));
}

TEST(ChunkPlanTest, OnlyTheFirstChunkLeavesRoomForSegments) {
  ScoreCase c(100);
  for (int64_t segment = 0; segment <= 50; ++segment) c.segment_offsets.push_back(2 * segment);
  c.args.segment_offsets = c.segment_offsets;

  // 1,024 bytes are reserved for other fields; a row takes 16 + 4 bytes, a segment 4.
  const ChunkPlan plan = PlanChunks(c.args, {.message_bytes_max = 1024 + 40 * 20}, kManyBytes);

  EXPECT_THAT(RowRanges(plan), ElementsAre(Pair(0, 30), Pair(30, 64), Pair(64, 98), Pair(98, 100)));
}

TEST(ChunkPlanTest, LeavesSegmentsToTheServerOnlyInAWholeCall) {
  ScoreCase c(10);
  c.segment_offsets = {0, 5, 10};
  c.args.segment_offsets = c.segment_offsets;

  EXPECT_FALSE(PlanChunks(c.args, {}, kManyBytes).sum_segments_in_client);
  EXPECT_TRUE(PlanChunks(c.args, {.request_rows_max = 5}, kManyBytes).sum_segments_in_client);
  EXPECT_TRUE(PlanChunks(c.args, {.segments_max = 1}, kManyBytes).sum_segments_in_client);
}

}  // namespace
}  // namespace logprobd::client
