#include "client/cpp/result_merger.h"

#include <grpcpp/support/slice.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "logprobd/v1/scoring.pb.h"
#include "tests/unit/client/cpp/score_case.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Limits kTwoRows = {.request_rows_max = 2};
constexpr int64_t kManyBytes = int64_t{1} << 30;

template <typename T>
std::string Encode(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

grpc::ByteBuffer Body(const v1::ScoreResponse& response) {
  const grpc::Slice slice(response.SerializeAsString());
  return {&slice, 1};
}

v1::ScoreResponse Response(const std::vector<float>& logprob) {
  v1::ScoreResponse response;
  response.set_rows(static_cast<uint32_t>(logprob.size()));
  response.set_weights_version(1);
  response.set_logprob(Encode(logprob));
  return response;
}

TEST(ResultMergerTest, PutsChunksInOrderWhicheverComesFirst) {
  ScoreCase c(3);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, kTwoRows, kManyBytes);
  ResultMerger merger(c.args, plan);

  ASSERT_TRUE(merger.Add(plan.chunks[1], Body(Response({-3}))).ok());
  ASSERT_TRUE(merger.Add(plan.chunks[0], Body(Response({-1, -2}))).ok());

  const ScoreResult result = merger.Finish();
  EXPECT_THAT(result.logprob, ElementsAre(-1, -2, -3));
  EXPECT_THAT(result.entropy, IsEmpty());
  EXPECT_EQ(result.requests, 2);
}

TEST(ResultMergerTest, AddsCountsAndKeepsTheLongestTimings) {
  ScoreCase c(3);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, kTwoRows, kManyBytes);
  ResultMerger merger(c.args, plan);
  v1::ScoreResponse first = Response({-1, -2});
  first.set_ignored_rows(1);
  first.set_nonfinite_rows(1);
  first.mutable_timings()->set_queue_us(5);
  first.mutable_timings()->set_total_us(50);
  v1::ScoreResponse second = Response({-3});
  second.set_ignored_rows(1);
  second.mutable_timings()->set_queue_us(9);
  second.mutable_timings()->set_total_us(20);

  ASSERT_TRUE(merger.Add(plan.chunks[0], Body(first)).ok());
  ASSERT_TRUE(merger.Add(plan.chunks[1], Body(second)).ok());

  const ScoreResult result = merger.Finish();
  EXPECT_EQ(result.ignored_rows, 2);
  EXPECT_EQ(result.nonfinite_rows, 1);
  EXPECT_EQ(result.timings.queue_us, 9U);
  EXPECT_EQ(result.timings.total_us, 50U);
}

TEST(ResultMergerTest, SumsSegmentsThatWereCut) {
  ScoreCase c(5);
  c.args.outputs = output::kLogprob;
  c.targets[3] = -100;  // ignored
  c.segment_offsets = {0, 3, 3, 5};
  c.args.segment_offsets = c.segment_offsets;
  const ChunkPlan plan = PlanChunks(c.args, kTwoRows, kManyBytes);
  ResultMerger merger(c.args, plan);
  const std::vector<std::vector<float>> logprobs = {{-1, -2}, {-4, 0}, {-8}};
  const std::vector<std::vector<uint8_t>> greedy = {{1, 1}, {1, 0}, {0}};

  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    v1::ScoreResponse response = Response(logprobs[i]);
    response.set_greedy(Encode(greedy[i]));
    ASSERT_TRUE(merger.Add(plan.chunks[i], Body(response)).ok());
  }

  const ScoreResult result = merger.Finish();
  EXPECT_THAT(result.segment_logprob, ElementsAre(-7.0, 0.0, -8.0));
  EXPECT_THAT(result.segment_rows, ElementsAre(3U, 0U, 1U));
  EXPECT_THAT(result.segment_greedy, ElementsAre(1, 1, 0));
  EXPECT_THAT(result.greedy, IsEmpty());  // not asked for by the caller
}

TEST(ResultMergerTest, RefusesAnOutputOfTheWrongSize) {
  ScoreCase c(2);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);
  ResultMerger merger(c.args, plan);
  v1::ScoreResponse response = Response({-1, -2});
  response.set_logprob(Encode<float>({-1, -2, -3}));

  const absl::Status status = merger.Add(plan.chunks[0], Body(response));

  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("12 bytes of logprob where 8 were due"));
}

// A huge top_k threw bad_alloc on a gRPC thread before the server could refuse it.
TEST(ResultMergerTest, TakesNoMemoryForATopKThatNobodyAnswered) {
  ScoreCase c(3);
  c.args.outputs = output::kLogprob;
  c.args.top_k = std::numeric_limits<int32_t>::max();
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);

  ResultMerger merger(c.args, plan);
  const absl::Status status = merger.Add(plan.chunks[0], Body(Response({-1, -2, -3})));

  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("top_k_ids"));
}

TEST(ResultMergerTest, RefusesAnswersThatAreNotOurs) {
  ScoreCase c(2);
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);
  ResultMerger merger(c.args, plan);
  const grpc::Slice garbage(std::string(9, '\xFF'));

  EXPECT_EQ(merger.Add(plan.chunks[0], grpc::ByteBuffer(&garbage, 1)).code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(merger.Add(plan.chunks[0], Body(Response({-1}))).code(), absl::StatusCode::kInternal);
}

TEST(ResultMergerTest, NeverMixesWeightsVersions) {
  ScoreCase c(3);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, kTwoRows, kManyBytes);
  ResultMerger merger(c.args, plan);
  v1::ScoreResponse second = Response({-3});
  second.set_weights_version(2);

  ASSERT_TRUE(merger.Add(plan.chunks[0], Body(Response({-1, -2}))).ok());

  EXPECT_EQ(merger.Add(plan.chunks[1], Body(second)).code(), absl::StatusCode::kAborted);
}

TEST(ResultMergerTest, TakesAChunkAgainInAnotherVersion) {
  ScoreCase c(3);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, kTwoRows, kManyBytes);
  ResultMerger merger(c.args, plan);
  v1::ScoreResponse first = Response({-1, -2});
  first.set_ignored_rows(1);
  v1::ScoreResponse second = Response({-3});
  second.set_weights_version(2);
  v1::ScoreResponse again = Response({-5, -6});
  again.set_weights_version(2);
  again.set_ignored_rows(1);
  const auto keep = [](uint64_t) -> absl::StatusOr<bool> { return true; };

  ASSERT_TRUE(*merger.Offer(plan.chunks[0], Body(first), keep));
  ASSERT_TRUE(*merger.Offer(plan.chunks[1], Body(second), keep));
  EXPECT_THAT(merger.OtherThan(2), ElementsAre(&plan.chunks[0]));
  ASSERT_TRUE(*merger.Offer(plan.chunks[0], Body(again), keep));
  EXPECT_THAT(merger.OtherThan(2), IsEmpty());

  const ScoreResult result = merger.Finish();
  EXPECT_THAT(result.logprob, ElementsAre(-5, -6, -3));
  EXPECT_EQ(result.ignored_rows, 1);
  EXPECT_THAT(result.weights_versions, ElementsAre(2U));
}

TEST(ResultMergerTest, LeavesOutAnAnswerThatIsNotKept) {
  ScoreCase c(2);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, kTwoRows, kManyBytes);
  ResultMerger merger(c.args, plan);
  ASSERT_TRUE(merger.Add(plan.chunks[0], Body(Response({-1, -2}))).ok());

  EXPECT_FALSE(*merger.Offer(plan.chunks[0], Body(Response({-8, -9})),
                             [](uint64_t) -> absl::StatusOr<bool> { return false; }));

  EXPECT_THAT(merger.Finish().logprob, ElementsAre(-1, -2));
}

}  // namespace
}  // namespace logprobd::client
