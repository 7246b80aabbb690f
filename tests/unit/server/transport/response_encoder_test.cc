#include "server/transport/response_encoder.h"

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "tests/support/fake_head.h"
#include "tests/support/transport_server.h"

namespace logprobd {
namespace {

using testing::BytesOf;
using ::testing::IsEmpty;

v1::ScoreResponse Decode(ScoreReply reply) {
  v1::ScoreResponse response;
  EXPECT_TRUE(response.ParseFromString(testing::StringOf(EncodeScoreReply(std::move(reply)))));
  return response;
}

/// Returns the field of ScoreResponse with the name of `column`.
template <typename T>
const google::protobuf::FieldDescriptor* FieldOf(const OutputColumn<T>& column) {
  return v1::ScoreResponse::descriptor()->FindFieldByName(std::string(column.name));
}

TEST(OutputTableTest, HasEveryArrayOfTheResponseInTheOrderOfItsFields) {
  std::vector<std::string> columns;
  ForEachOutputColumn([&](const auto& column) {
    const auto* field = FieldOf(column);
    ASSERT_NE(field, nullptr) << column.name;
    EXPECT_EQ(field->number(), static_cast<int>(column.wire_field)) << column.name;
    columns.emplace_back(field->name());
  });

  std::vector<std::string> arrays;
  const auto* message = v1::ScoreResponse::descriptor();
  for (int i = 0; i < message->field_count(); ++i) {
    if (message->field(i)->type() == google::protobuf::FieldDescriptor::TYPE_BYTES) {
      arrays.emplace_back(message->field(i)->name());
    }
  }
  EXPECT_EQ(columns, arrays);
}

TEST(OutputTableTest, HasTheBitsOfTheProto) {
  const auto* values = google::protobuf::GetEnumDescriptor<v1::Output>();
  uint32_t bits = 0;
  for (int i = 0; i < values->value_count(); ++i) {
    bits |= static_cast<uint32_t>(values->value(i)->number());
  }
  EXPECT_EQ(bits, kAllOutputBits);
}

class ResponseEncoderTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(ResponseEncoderTest, IsReadBackByProtobuf) {
  ScoreRequest request;
  request.rows = GetParam();
  request.targets.resize(static_cast<size_t>(request.rows));
  std::iota(request.targets.begin(), request.targets.end(), 0);
  request.output_bits = kAllOutputBits;
  request.top_k = 3;
  request.candidate_ids = {4, 5, 6};
  request.segment_offsets = {0, 1, static_cast<uint32_t>(request.rows)};
  ScoreReply reply;
  reply.request_id = "id";
  reply.chunk_id = 1ULL << 40;
  reply.result = testing::FakeScores(request);
  reply.result.nonfinite_rows = 2;
  reply.result.ignored_rows = 1;
  reply.result.stages = {.queue = 1e-3, .copy = 2e-6, .engine = -1, .total = 1e9};
  const ScoreResult expected = reply.result;

  const v1::ScoreResponse response = Decode(std::move(reply));

  EXPECT_EQ(response.request_id(), "id");
  EXPECT_EQ(response.chunk_id(), 1ULL << 40);
  EXPECT_EQ(response.weights_version(), 3U);
  EXPECT_EQ(response.status_code(), 0);
  EXPECT_EQ(response.rows(), GetParam());
  EXPECT_EQ(response.ignored_rows(), 1U);
  EXPECT_EQ(response.nonfinite_rows(), 2U);
  ForEachOutputColumn([&](const auto& column) {
    const std::string& bytes = response.GetReflection()->GetStringReference(
        response, FieldOf(column), /*scratch=*/nullptr);
    EXPECT_EQ(bytes, BytesOf(expected.*column.values)) << column.name;
  });
  EXPECT_EQ(response.timings().queue_us(), 1'000U);
  EXPECT_EQ(response.timings().copy_us(), 2U);
  EXPECT_EQ(response.timings().engine_us(), 0U);
  EXPECT_EQ(response.timings().total_us(), 4'294'967'295U);
}

// The sizes are around that of the smallest array that becomes a separate slice.
INSTANTIATE_TEST_SUITE_P(Rows, ResponseEncoderTest, ::testing::Values(1, 2, 1'023, 1'024, 4'096),
                         ::testing::PrintToStringParamName());

/// Returns the encoded trace of a request that was received 10 s after the epoch of the clock.
v1::Trace TraceOf(const StageTimes& times, const TraceContext& context = {}) {
  const absl::Time received = absl::UnixEpoch() + absl::Seconds(10);
  ScoreReply reply;
  reply.result.times = times;
  reply.trace = ReplyTrace{.context = context,
                           .received = received,
                           .received_wall = absl::FromUnixNanos(1'800'000'000'123'456'789),
                           .replied = received + absl::Seconds(90)};
  v1::ScoreResponse response = Decode(std::move(reply));
  EXPECT_TRUE(response.has_trace());
  return response.trace();
}

std::pair<uint64_t, uint64_t> Of(const v1::TraceStage& stage) {
  return {stage.begin_ns(), stage.end_ns()};
}

TEST(ResponseEncoderTraceTest, StagesReachFromTheFirstToTheLastBatch) {
  constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  const auto at = [](int64_t ns) {
    return absl::UnixEpoch() + absl::Seconds(10) + absl::Nanoseconds(ns);
  };

  const v1::Trace trace = TraceOf({.submitted = at(1),
                                   .first_cut = at(20),
                                   .last_cut = at(300),
                                   .first_start = at(4'000),
                                   .last_start = at(50'000),
                                   .last_end = at(6'000'000'000),
                                   .kernel_seconds = 1.5},
                                  TraceContext::Parse(kTraceparent));

  using Stage = std::pair<uint64_t, uint64_t>;
  EXPECT_EQ(trace.traceparent(), kTraceparent);
  EXPECT_EQ(trace.received_unix_ns(), 1'800'000'000'123'456'789U);
  EXPECT_EQ(Of(trace.receive()), Stage(0, 1));
  EXPECT_EQ(Of(trace.queue()), Stage(1, 300));
  EXPECT_EQ(Of(trace.copy()), Stage(20, 50'000));
  EXPECT_EQ(Of(trace.engine()), Stage(4'000, 6'000'000'000));
  EXPECT_EQ(trace.kernel_ns(), 1'500'000'000U);
  EXPECT_EQ(Of(trace.reply()), Stage(6'000'000'000, 90'000'000'000));
}

TEST(ResponseEncoderTraceTest, ARequestWithoutScoredRowsHasNoCopyAndNoEngine) {
  const v1::Trace trace =
      TraceOf({.submitted = absl::UnixEpoch() + absl::Seconds(10) + absl::Nanoseconds(7)});

  using Stage = std::pair<uint64_t, uint64_t>;
  EXPECT_EQ(trace.traceparent(), "");
  EXPECT_EQ(Of(trace.receive()), Stage(0, 7));
  EXPECT_EQ(Of(trace.queue()), Stage(7, 7));
  EXPECT_FALSE(trace.has_copy());
  EXPECT_FALSE(trace.has_engine());
  EXPECT_EQ(trace.kernel_ns(), 0U);
  EXPECT_EQ(Of(trace.reply()), Stage(7, 90'000'000'000));
}

TEST(ResponseEncoderTraceTest, ATimeBeforeTheArrivalCountsAsTheArrival) {
  const v1::Trace trace =
      TraceOf({.submitted = absl::UnixEpoch() + absl::Seconds(10) - absl::Nanoseconds(7)});

  using Stage = std::pair<uint64_t, uint64_t>;
  EXPECT_EQ(Of(trace.receive()), Stage(0, 0));
  EXPECT_EQ(Of(trace.queue()), Stage(0, 0));
  EXPECT_EQ(Of(trace.reply()), Stage(0, 90'000'000'000));
}

TEST(ResponseEncoderStatusTest, AnErrorCarriesItsStatusAndNothingElse) {
  ScoreReply reply;
  reply.request_id = "id";
  reply.chunk_id = 5;
  reply.status =
      WithRetryAfter(absl::ResourceExhaustedError("queue is full"), absl::Milliseconds(20));

  const v1::ScoreResponse response = Decode(std::move(reply));

  EXPECT_EQ(response.request_id(), "id");
  EXPECT_EQ(response.chunk_id(), 5U);
  EXPECT_EQ(response.status_code(), 8);
  EXPECT_EQ(response.status_message(), "queue is full");
  EXPECT_EQ(response.retry_after_ms(), 20U);
  EXPECT_THAT(response.logprob(), IsEmpty());
}

TEST(ResponseEncoderStatusTest, AnEmptyAnswerIsAnEmptyMessage) {
  const v1::ScoreResponse response = Decode(ScoreReply());
  EXPECT_EQ(response.rows(), 0U);
  EXPECT_EQ(response.ByteSizeLong(), 0U);
}

}  // namespace
}  // namespace logprobd
