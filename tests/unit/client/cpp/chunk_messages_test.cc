#include "client/cpp/chunk_messages.h"

#include <grpcpp/support/slice.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "logprobd/v1/scoring.pb.h"
#include "tests/unit/client/cpp/score_case.h"

namespace logprobd::client {
namespace {

constexpr Limits kFourRows = {.request_rows_max = 4};
constexpr int64_t kManyBytes = int64_t{1} << 30;

v1::ScoreRequest Parse(const grpc::ByteBuffer& body) {
  grpc::Slice slice;
  EXPECT_TRUE(body.DumpToSingleSlice(&slice).ok());
  v1::ScoreRequest request;
  EXPECT_TRUE(request.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  return request;
}

template <typename T>
std::vector<T> Decode(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST(RequestEncoderTest, ProtobufReadsWhatItWrites) {
  ScoreCase c(3);
  c.args.head = "base";
  c.args.request_id = "id-1";
  c.args.weights_version = 7;
  c.args.temperature = 0.5F;
  c.args.entropy_temperature = 1.0F;
  c.args.ignore_index = -1;
  c.args.outputs = output::kLse | output::kGreedy;
  c.args.top_k = 5;
  c.args.priority = Priority::kLow;
  c.args.reject_nonfinite = true;
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);

  const v1::ScoreRequest request = Parse(EncodeScoreRequest(c.args, plan, plan.chunks[0], nullptr));

  EXPECT_EQ(request.head(), "base");
  EXPECT_EQ(request.request_id(), "id-1");
  EXPECT_EQ(request.weights_version(), 7U);
  EXPECT_EQ(request.dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(request.rows(), 3U);
  EXPECT_EQ(request.hidden_size(), 8U);
  EXPECT_EQ(Decode<int32_t>(request.targets()), c.targets);
  EXPECT_EQ(request.temperature(), 0.5F);
  EXPECT_EQ(request.entropy_temperature(), 1.0F);
  EXPECT_EQ(request.ignore_index(), -1);
  EXPECT_EQ(request.outputs(), 4U + 16U);
  EXPECT_EQ(request.top_k(), 5U);
  EXPECT_EQ(request.priority(), v1::PRIORITY_LOW);
  EXPECT_TRUE(request.reject_nonfinite());
  EXPECT_EQ(request.hidden(),
            std::string(reinterpret_cast<const char*>(c.hidden.data()), c.hidden.size()));
}

TEST(RequestEncoderTest, RefersToTheCallersRowsInsteadOfCopyingThem) {
  const ScoreCase c(6);
  const ChunkPlan plan = PlanChunks(c.args, kFourRows, kManyBytes);

  const grpc::ByteBuffer body = EncodeScoreRequest(c.args, plan, plan.chunks[1], nullptr);

  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(body.Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 2U);
  EXPECT_EQ(static_cast<const void*>(slices[1].begin()), c.hidden.data() + 3 * 16);
  EXPECT_EQ(slices[1].size(), 3U * 16U);
}

TEST(RequestEncoderTest, KeepsTheHoldUntilTheSliceIsDropped) {
  const ScoreCase c(1);
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);
  auto hold = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = hold;

  {
    const grpc::ByteBuffer body = EncodeScoreRequest(c.args, plan, plan.chunks[0], std::move(hold));
    EXPECT_FALSE(watch.expired());
  }

  EXPECT_TRUE(watch.expired());
}

TEST(RequestEncoderTest, SendsTheLocationOfPlacedRows) {
  const ScoreCase c(4);
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);
  void* const memory =
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Placement placement;
  placement.shared =
      SharedSpan{.region = std::make_shared<SharedRegion>(
                     "region-1", absl::MakeSpan(static_cast<std::byte*>(memory), 4096)),
                 .offset = 128,
                 .bytes = 64};

  const v1::ScoreRequest request =
      Parse(EncodeSliceRequest(c.args, plan, plan.chunks[0], placement));

  EXPECT_EQ(request.rows(), 4U);
  EXPECT_EQ(Decode<int32_t>(request.targets()), c.targets);
  EXPECT_EQ(request.hidden(), "");
  EXPECT_FALSE(request.has_cuda_ipc());
  EXPECT_EQ(request.shared_memory().region(), "region-1");
  EXPECT_EQ(request.shared_memory().offset(), 128U);
  EXPECT_EQ(request.shared_memory().bytes(), 64U);
}

TEST(RequestEncoderTest, MovesOffsetsToTheChunk) {
  ScoreCase c(6);
  c.candidate_ids = {10, 11, 12, 13, 14, 15};
  c.candidate_offsets = {0, 1, 1, 3, 3, 4, 6};
  c.args.candidate_ids = c.candidate_ids;
  c.args.candidate_offsets = c.candidate_offsets;
  const ChunkPlan plan = PlanChunks(c.args, kFourRows, kManyBytes);

  const v1::ScoreRequest request = Parse(EncodeScoreRequest(c.args, plan, plan.chunks[1], nullptr));

  EXPECT_EQ(Decode<int32_t>(request.candidate_ids()), (std::vector<int32_t>{13, 14, 15}));
  EXPECT_EQ(Decode<uint32_t>(request.candidate_offsets()), (std::vector<uint32_t>{0, 0, 1, 3}));
}

TEST(RequestEncoderTest, RequestsTheOutputsThatSummingSegmentsNeeds) {
  ScoreCase c(6);
  c.segment_offsets = {0, 3, 6};
  c.args.segment_offsets = c.segment_offsets;
  c.args.outputs = output::kEntropy;
  const ChunkPlan whole = PlanChunks(c.args, {}, kManyBytes);
  const ChunkPlan cut = PlanChunks(c.args, kFourRows, kManyBytes);

  const v1::ScoreRequest whole_request =
      Parse(EncodeScoreRequest(c.args, whole, whole.chunks[0], nullptr));
  const v1::ScoreRequest cut_request =
      Parse(EncodeScoreRequest(c.args, cut, cut.chunks[0], nullptr));

  EXPECT_EQ(whole_request.outputs(), output::kEntropy);
  EXPECT_EQ(Decode<uint32_t>(whole_request.segment_offsets()), (std::vector<uint32_t>{0, 3, 6}));
  EXPECT_EQ(cut_request.outputs(), output::kEntropy | output::kLogprob | output::kGreedy);
  EXPECT_TRUE(cut_request.segment_offsets().empty());
}

TEST(RequestEncoderTest, AsksForATraceButLeavesTheTraceparentToTheTransport) {
  ScoreCase c(2);
  c.args.trace = true;
  c.args.traceparent = "00-";
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);

  const v1::ScoreRequest request = Parse(EncodeScoreRequest(c.args, plan, plan.chunks[0], nullptr));

  EXPECT_TRUE(request.trace());
  EXPECT_EQ(request.traceparent(), "");
}

TEST(RequestEncoderTest, SendsRowTemperaturesInsteadOfOne) {
  ScoreCase c(2);
  const std::vector<float> temperatures = {0.5F, 2.0F};
  c.args.row_temperatures = temperatures;
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);

  const v1::ScoreRequest request = Parse(EncodeScoreRequest(c.args, plan, plan.chunks[0], nullptr));

  EXPECT_EQ(Decode<float>(request.row_temperatures()), temperatures);
  EXPECT_FALSE(request.has_temperature());
}

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Limits kTwoRows = {.request_rows_max = 2};

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

constexpr auto kKeep = [](uint64_t) -> absl::StatusOr<bool> { return true; };

TEST(ResultMergerTest, PutsChunksInOrderWhicheverComesFirst) {
  ScoreCase c(3);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, kTwoRows, kManyBytes);
  ResultMerger merger(c.args, plan);

  ASSERT_TRUE(merger.Add(plan.chunks[1], Body(Response({-3})), kKeep).ok());
  ASSERT_TRUE(merger.Add(plan.chunks[0], Body(Response({-1, -2})), kKeep).ok());

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
  first.mutable_timings()->set_copy_us(6);
  first.mutable_timings()->set_engine_us(31);
  first.mutable_timings()->set_total_us(50);
  v1::ScoreResponse second = Response({-3});
  second.set_ignored_rows(1);
  second.mutable_timings()->set_queue_us(9);
  second.mutable_timings()->set_copy_us(7);
  second.mutable_timings()->set_engine_us(8);
  second.mutable_timings()->set_total_us(20);

  ASSERT_TRUE(merger.Add(plan.chunks[0], Body(first), kKeep).ok());
  ASSERT_TRUE(merger.Add(plan.chunks[1], Body(second), kKeep).ok());

  const ScoreResult result = merger.Finish();
  EXPECT_EQ(result.ignored_rows, 2);
  EXPECT_EQ(result.nonfinite_rows, 1);
  EXPECT_EQ(result.timings.queue_us, 9U);
  EXPECT_EQ(result.timings.copy_us, 7U);
  EXPECT_EQ(result.timings.engine_us, 31U);
  EXPECT_EQ(result.timings.total_us, 50U);
}

/// Returns a response with a trace whose stages have different times.
v1::ScoreResponse TracedResponse(const std::vector<float>& logprob, uint64_t received_unix_ns) {
  v1::ScoreResponse response = Response(logprob);
  v1::Trace& trace = *response.mutable_trace();
  trace.set_traceparent("00-");
  trace.set_received_unix_ns(received_unix_ns);
  trace.mutable_receive()->set_end_ns(1);
  trace.mutable_queue()->set_begin_ns(2);
  trace.mutable_queue()->set_end_ns(3);
  trace.mutable_copy()->set_begin_ns(4);
  trace.mutable_copy()->set_end_ns(5);
  trace.mutable_engine()->set_begin_ns(6);
  trace.mutable_engine()->set_end_ns(7);
  trace.set_kernel_ns(8);
  trace.mutable_reply()->set_begin_ns(9);
  trace.mutable_reply()->set_end_ns(10);
  return response;
}

std::pair<int64_t, int64_t> Nanoseconds(const StageTrace& stage) {
  return {absl::ToInt64Nanoseconds(stage.begin), absl::ToInt64Nanoseconds(stage.end)};
}

TEST(ResultMergerTest, KeepsTheTracesOfAllChunksInTheOrderOfRows) {
  ScoreCase c(3);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, kTwoRows, kManyBytes);
  ResultMerger merger(c.args, plan);

  ASSERT_TRUE(merger.Add(plan.chunks[1], Body(TracedResponse({-3}, 2'000)), kKeep).ok());
  ASSERT_TRUE(merger.Add(plan.chunks[0], Body(TracedResponse({-1, -2}, 1'000)), kKeep).ok());

  const ScoreResult result = merger.Finish();
  ASSERT_EQ(result.traces.size(), 2U);
  EXPECT_EQ(result.traces[0].received, absl::FromUnixNanos(1'000));
  EXPECT_EQ(result.traces[1].received, absl::FromUnixNanos(2'000));
  const RequestTrace& trace = result.traces[0];
  using Stage = std::pair<int64_t, int64_t>;
  EXPECT_EQ(trace.traceparent, "00-");
  EXPECT_EQ(Nanoseconds(trace.receive), Stage(0, 1));
  EXPECT_EQ(Nanoseconds(trace.queue), Stage(2, 3));
  EXPECT_EQ(Nanoseconds(trace.copy.value()), Stage(4, 5));
  EXPECT_EQ(Nanoseconds(trace.engine.value()), Stage(6, 7));
  EXPECT_EQ(trace.kernel, absl::Nanoseconds(8));
  EXPECT_EQ(Nanoseconds(trace.reply), Stage(9, 10));
}

TEST(ResultMergerTest, ATraceWithoutScoredRowsHasNoCopyAndNoEngine) {
  ScoreCase c(1);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);
  ResultMerger merger(c.args, plan);
  v1::ScoreResponse response = TracedResponse({0}, 1'000);
  response.mutable_trace()->clear_copy();
  response.mutable_trace()->clear_engine();

  ASSERT_TRUE(merger.Add(plan.chunks[0], Body(response), kKeep).ok());

  const ScoreResult result = merger.Finish();
  EXPECT_FALSE(result.traces.at(0).copy.has_value());
  EXPECT_FALSE(result.traces.at(0).engine.has_value());
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
    ASSERT_TRUE(merger.Add(plan.chunks[i], Body(response), kKeep).ok());
  }

  const ScoreResult result = merger.Finish();
  EXPECT_THAT(result.segment_logprob, ElementsAre(-7.0, 0.0, -8.0));
  EXPECT_THAT(result.segment_rows, ElementsAre(3U, 0U, 1U));
  EXPECT_THAT(result.segment_greedy, ElementsAre(1, 1, 0));
  EXPECT_THAT(result.greedy, IsEmpty());  // not requested by the caller
}

TEST(ResultMergerTest, RefusesAnOutputOfTheWrongSize) {
  ScoreCase c(2);
  c.args.outputs = output::kLogprob;
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);
  ResultMerger merger(c.args, plan);
  v1::ScoreResponse response = Response({-1, -2});
  response.set_logprob(Encode<float>({-1, -2, -3}));

  const absl::Status status = merger.Add(plan.chunks[0], Body(response), kKeep).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("12 bytes of logprob, but the client expects 8"));
}

// Regression: a huge top_k threw bad_alloc on a gRPC thread before the server could refuse it.
TEST(ResultMergerTest, TakesNoMemoryForATopKThatNobodyAnswered) {
  ScoreCase c(3);
  c.args.outputs = output::kLogprob;
  c.args.top_k = std::numeric_limits<int32_t>::max();
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);

  ResultMerger merger(c.args, plan);
  const absl::Status status =
      merger.Add(plan.chunks[0], Body(Response({-1, -2, -3})), kKeep).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("top_k_ids"));
}

TEST(ResultMergerTest, RefusesAnswersOfAnotherRequest) {
  ScoreCase c(2);
  const ChunkPlan plan = PlanChunks(c.args, {}, kManyBytes);
  ResultMerger merger(c.args, plan);
  const grpc::Slice garbage(std::string(9, '\xFF'));

  EXPECT_EQ(merger.Add(plan.chunks[0], grpc::ByteBuffer(&garbage, 1), kKeep).status().code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(merger.Add(plan.chunks[0], Body(Response({-1})), kKeep).status().code(),
            absl::StatusCode::kInternal);
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

  ASSERT_TRUE(*merger.Add(plan.chunks[0], Body(first), kKeep));
  ASSERT_TRUE(*merger.Add(plan.chunks[1], Body(second), kKeep));
  EXPECT_THAT(merger.OtherThan(2), ElementsAre(&plan.chunks[0]));
  ASSERT_TRUE(*merger.Add(plan.chunks[0], Body(again), kKeep));
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
  ASSERT_TRUE(merger.Add(plan.chunks[0], Body(Response({-1, -2})), kKeep).ok());

  EXPECT_FALSE(*merger.Add(plan.chunks[0], Body(Response({-8, -9})),
                           [](uint64_t) -> absl::StatusOr<bool> { return false; }));

  EXPECT_THAT(merger.Finish().logprob, ElementsAre(-1, -2));
}

}  // namespace
}  // namespace logprobd::client
