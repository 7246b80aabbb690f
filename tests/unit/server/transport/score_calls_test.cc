#include <chrono>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpc/grpc.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/client_callback.h"
#include "gtest/gtest.h"
#include "server/base/clock.h"
#include "server/base/errors.h"
#include "server/transport/grpc_versions.h"
#include "server/transport/unread_answers.h"
#include "tests/support/fake_clock.h"
#include "tests/support/test_stream.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class ScoreUnaryTest : public ::testing::Test {
 protected:
  grpc::Status Score(const v1::ScoreRequest& request) {
    return server_.stub->Score(&context_, request, &response_);
  }

  TransportServer server_;
  grpc::ClientContext context_;
  v1::ScoreResponse response_;
};

TEST_F(ScoreUnaryTest, AnswersWithTheScoresOfTheHead) {
  const grpc::Status status = Score(ValidRequest(3));

  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response_.request_id(), "test");
  EXPECT_EQ(response_.rows(), 3U);
  EXPECT_EQ(response_.weights_version(), 3U);
  EXPECT_THAT(ValuesOf<float>(response_.logprob()), ElementsAre(-0.125F, -0.25F, -0.375F));
  EXPECT_THAT(ValuesOf<float>(response_.entropy()), ElementsAre(1000.0F, 1001.0F, 1002.0F));
  EXPECT_THAT(response_.lse(), IsEmpty());
}

/// Returns the value of a series of the server.
double MetricOf(const TransportServer& server, const std::string& series) {
  const std::string text = absl::StrCat("\n", server.metrics.Serialize());
  const size_t begin = text.find(absl::StrCat("\n", series, " "));
  return begin == std::string::npos ? -1 : std::stod(text.substr(begin + series.size() + 2));
}

TEST(ScoreCallsTest, CountsTheBytesAndTheTimeOfEachResponse) {
  FakeClock clock;
  TransportServer server(TestServerOptions(), FakeHeadInfo(), /*with_head=*/true, clock);
  v1::ScoreResponse unary;
  grpc::ClientContext context;
  ASSERT_TRUE(server.stub->Score(&context, ValidRequest(), &unary).ok());
  TestStream stream(server.channel);
  stream.Send(ValidRequest(3));
  const v1::ScoreResponse chunk = stream.Read();
  stream.CloseWrites();
  EXPECT_TRUE(stream.Finish().ok());

  server.server->Shutdown(absl::InfiniteDuration());  // waits until they are counted

  EXPECT_EQ(MetricOf(server, R"(logprobd_sent_bytes_total{transport="tcp"})"),
            static_cast<double>(unary.ByteSizeLong() + chunk.ByteSizeLong()));
  EXPECT_EQ(MetricOf(server, R"(logprobd_stage_duration_seconds_count{stage="reply"})"), 2);
  EXPECT_EQ(MetricOf(server, R"(logprobd_stage_duration_seconds_sum{stage="reply"})"), 0);
}

// A response that is noted as unread after its call has ended would be cancelled in vain.
TEST(ScoreCallsTest, AResponseThatWasTakenIsNotCancelledLater) {
  FakeClock clock;
  TransportServer server(TestServerOptions(), FakeHeadInfo(), /*with_head=*/true, clock);
  v1::ScoreResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(server.stub->Score(&context, ValidRequest(), &response).ok());
  TestStream stream(server.channel);
  stream.Send(ValidRequest());
  stream.Read();
  stream.CloseWrites();
  EXPECT_TRUE(stream.Finish().ok());
  TestStream next(server.channel);  // stays open
  next.Send(ValidRequest());
  next.Read();
  // The server notes that a response was taken after its client has it.
  const std::string replies = R"(logprobd_stage_duration_seconds_count{stage="reply"})";
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (MetricOf(server, replies) < 3 && absl::Now() < end) std::this_thread::yield();
  ASSERT_EQ(MetricOf(server, replies), 3);

  clock.Advance(absl::Hours(1));

  EXPECT_EQ(server.server->CancelUnreadAnswers(), 0);
  next.Send(ValidRequest());
  EXPECT_EQ(next.Read().status_code(), 0);
}

/// A call of a unary method whose client takes only the first bytes of the response, until Read.
class NarrowCall final : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  NarrowCall(const std::string& address, const std::string& message)
      : stub_(NewChannel(address)), outgoing_(BufferOf(message)) {
    stub_.PrepareBidiStreamingCall(&context_, kScoreMethod, grpc::StubOptions(), this);
    AddHold();
    StartWriteLast(&outgoing_, grpc::WriteOptions());
    StartCall();
  }
  /// Takes the response and returns the status.
  grpc::Status Finish() {
    StartRead(&incoming_);
    RemoveHold();
    done_.WaitForNotification();
    return status_;
  }

 private:
  static std::shared_ptr<grpc::Channel> NewChannel(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 5);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // would widen it
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }
  void OnDone(const grpc::Status& status) override {
    status_ = status;
    done_.Notify();
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer outgoing_;
  grpc::ByteBuffer incoming_;
  grpc::Status status_;
  absl::Notification done_;
};

TEST(ScoreCallsTest, AUnaryCallWhoseClientDoesNotReadIsCancelledInTheEnd) {
  FakeClock clock;
  TransportServer server(TestServerOptions(), FakeHeadInfo(), /*with_head=*/true, clock);
  NarrowCall call(server.address(), ValidRequest().SerializeAsString());
  server.head->WaitForSubmitted(1);

  do {
    clock.Advance(2 * UnreadAnswers::kTimeMax);
  } while (server.server->CancelUnreadAnswers() == 0);

  EXPECT_EQ(call.Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(ScoreUnaryTest, PassesTheMessageUnchangedToTheHead) {
  v1::ScoreRequest request = ValidRequest(2);
  request.set_temperature(0.5F);
  request.set_chunk_id(7);
  std::string hidden(32, '\0');
  for (size_t i = 0; i < hidden.size(); ++i) {
    hidden[i] = static_cast<char>(i);
  }
  request.set_hidden(hidden);

  ASSERT_TRUE(Score(request).ok());

  const ScoreRequest seen = server_.head->last_request();
  std::string payload;
  for (const auto piece : seen.hidden.pieces) {
    payload.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  EXPECT_EQ(payload, hidden);
  EXPECT_THAT(seen.targets, ElementsAre(0, 1));
  EXPECT_EQ(seen.temperature, 0.5F);
  EXPECT_EQ(seen.chunk_id, 7U);
  EXPECT_EQ(seen.client_id, "ipv4:127.0.0.1");
  EXPECT_EQ(seen.deadline, absl::InfiniteFuture());
}

TEST_F(ScoreUnaryTest, TakesTheClientFromMetadataAndTheDeadlineOntoTheSteadyClock) {
  context_.AddMetadata("client_id", "trainer 7");
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));

  ASSERT_TRUE(Score(ValidRequest()).ok());

  const ScoreRequest seen = server_.head->last_request();
  EXPECT_EQ(seen.client_id, "trainer_7");
  const absl::Duration left = seen.deadline - Clock::Steady().Now();
  EXPECT_GT(left, absl::Minutes(55));
  EXPECT_LE(left, absl::Minutes(61));  // gRPC sends three digits of the timeout
}

constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
constexpr char kOtherTraceparent[] = "00-11111111111111111111111111111111-2222222222222222-00";

TEST_F(ScoreUnaryTest, TakesTheTraceFromMetadataAndReturnsItsTimesOnRequest) {
  context_.AddMetadata("traceparent", kTraceparent);
  v1::ScoreRequest request = ValidRequest();
  request.set_trace(true);
  const absl::Time before = WallNow();

  ASSERT_TRUE(Score(request).ok());

  const v1::Trace& trace = response_.trace();
  EXPECT_EQ(trace.traceparent(), kTraceparent);
  EXPECT_GE(absl::FromUnixNanos(static_cast<int64_t>(trace.received_unix_ns())), before);
  EXPECT_LE(absl::FromUnixNanos(static_cast<int64_t>(trace.received_unix_ns())), WallNow());
  EXPECT_EQ(trace.receive().end_ns(), 1'000U);  // see FakeScores
  EXPECT_EQ(trace.engine().end_ns(), 6'000U);
}

TEST_F(ScoreUnaryTest, IgnoresTracesThatAreNotValid) {
  context_.AddMetadata("traceparent", "00-not-valid");

  ASSERT_TRUE(Score(ValidRequest()).ok());

  EXPECT_TRUE(server_.head->last_request().trace_context.empty());
  EXPECT_FALSE(response_.has_trace());
}

TEST_F(ScoreUnaryTest, IgnoresTwoTracesInTheMetadataUnlessGrpcDropsOne) {
  context_.AddMetadata("traceparent", kTraceparent);
  context_.AddMetadata("traceparent", kOtherTraceparent);

  ASSERT_TRUE(Score(ValidRequest()).ok());

  const bool does_grpc_drop_one = GrpcVulnerabilities(GrpcVersion()).empty();
  EXPECT_EQ(server_.head->last_request().trace_context.traceparent(),
            does_grpc_drop_one ? kOtherTraceparent : "");
}

TEST_F(ScoreUnaryTest, SendsTheRetryHintOfARefusal) {
  server_.head->RefuseWith(
      WithRetryAfter(absl::ResourceExhaustedError("queue is full"), absl::Milliseconds(40)));

  const grpc::Status status = Score(ValidRequest());

  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(status.error_message(), "queue is full");
  const auto& metadata = context_.GetServerTrailingMetadata();
  const auto hint = metadata.find("grpc-retry-pushback-ms");
  ASSERT_NE(hint, metadata.end());
  EXPECT_EQ(std::string(hint->second.data(), hint->second.size()), "40");
}

TEST_F(ScoreUnaryTest, KeepsTheDetailsOfAnInternalErrorFromTheClient) {
  server_.head->AnswerWith(absl::InternalError("cudaMemcpyAsync failed on gpu3 in cuda.cc:12"));

  const grpc::Status status = Score(ValidRequest());

  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("log"), Not(HasSubstr("gpu3"))));
}

TEST_F(ScoreUnaryTest, CancelsTheRequestWhenItsClientLeaves) {
  server_.head->Hold();
  v1::ScoreRequest request = ValidRequest();
  grpc::Status status;
  absl::Notification done;
  server_.stub->async()->Score(&context_, &request, &response_, [&](grpc::Status s) {
    status = std::move(s);
    done.Notify();
  });
  server_.head->WaitForSubmitted(1);

  context_.TryCancel();

  server_.head->WaitForCancelled(1);
  done.WaitForNotification();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(server_.head->num_waiting(), 0);
}

TEST_F(ScoreUnaryTest, CancelsTheRequestWhenItsDeadlinePassesInTheQueue) {
  server_.head->Hold();
  // The request arrives in time even on a busy machine, and only the deadline ends the wait.
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));

  const grpc::Status status = Score(ValidRequest());

  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  server_.head->WaitForCancelled(1);
}

TEST_F(ScoreUnaryTest, SendsLargeAnswers) {
  HeadInfo info = FakeHeadInfo();
  info.limits.request_rows_max = 4'096;
  TransportServer server(TestServerOptions(), info);
  v1::ScoreRequest request = ValidRequest(0);
  request.set_rows(4'096);
  request.set_targets(BytesOf(std::vector<int32_t>(4'096, 7)));
  request.set_hidden(std::string(4'096 * 16, '\0'));
  request.set_top_k(16);

  const grpc::Status status = server.stub->Score(&context_, request, &response_);

  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(ValuesOf<float>(response_.logprob()), SizeIs(4'096));
  EXPECT_EQ(ValuesOf<float>(response_.logprob()).back(), -1.0F);
  EXPECT_THAT(ValuesOf<int32_t>(response_.top_k_ids()), SizeIs(65'536));
  EXPECT_EQ(ValuesOf<int32_t>(response_.top_k_ids()).back(), 65'535);
}

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

v1::ScoreRequest Chunk(uint64_t chunk_id, uint32_t rows = 1) {
  v1::ScoreRequest chunk = ValidRequest(rows);
  chunk.set_chunk_id(chunk_id);
  return chunk;
}

TEST(ScoreStreamTest, AnswersEachChunkAndEndsWithTheClient) {
  TransportServer server;
  TestStream stream(server.channel);
  for (uint64_t id = 1; id <= 20; ++id) {
    stream.Send(Chunk(id, 3));
  }
  stream.CloseWrites();

  std::vector<uint64_t> ids;
  for (int i = 0; i < 20; ++i) {
    const v1::ScoreResponse response = stream.Read();
    EXPECT_EQ(response.status_code(), 0);
    EXPECT_THAT(ValuesOf<float>(response.logprob()), ElementsAre(-0.125F, -0.25F, -0.375F));
    ids.push_back(response.chunk_id());
  }

  EXPECT_TRUE(stream.Finish().ok());
  std::vector<uint64_t> expected(20);
  std::iota(expected.begin(), expected.end(), 1);
  EXPECT_THAT(ids, UnorderedElementsAreArray(expected));  // any order is allowed
}

TEST(ScoreStreamTest, AChunkBelongsToItsOwnTraceOrElseToThatOfTheStream) {
  TransportServer server;
  TestStream stream(server.channel, {{"traceparent", kTraceparent}});
  v1::ScoreRequest chunk = Chunk(1);
  chunk.set_trace(true);

  stream.Send(chunk);
  EXPECT_EQ(stream.Read().trace().traceparent(), kTraceparent);
  chunk.set_traceparent(kOtherTraceparent);
  stream.Send(chunk);
  EXPECT_EQ(stream.Read().trace().traceparent(), kOtherTraceparent);
}

TEST(ScoreStreamTest, AnswersInTheOrderInWhichChunksFinish) {
  TransportServer server;
  server.head->Hold();
  TestStream stream(server.channel);
  stream.Send(Chunk(1));
  stream.Send(Chunk(2));
  stream.Send(Chunk(3));
  server.head->WaitForSubmitted(3);

  server.head->Release(/*reversed=*/true);

  EXPECT_EQ(stream.Read().chunk_id(), 3U);
  EXPECT_EQ(stream.Read().chunk_id(), 2U);
  EXPECT_EQ(stream.Read().chunk_id(), 1U);
}

TEST(ScoreStreamTest, ABadChunkDoesNotEndTheStream) {
  TransportServer server;
  TestStream stream(server.channel);
  v1::ScoreRequest bad = Chunk(7);
  bad.set_dtype(static_cast<v1::Dtype>(99));

  stream.Send(bad);
  const v1::ScoreResponse invalid = stream.Read();
  EXPECT_EQ(invalid.chunk_id(), 7U);
  EXPECT_EQ(invalid.request_id(), "test");
  EXPECT_EQ(invalid.status_code(), 3);
  EXPECT_THAT(invalid.status_message(), HasSubstr("dtype: 99"));

  stream.Send("\xFF\xFF not a message");
  EXPECT_EQ(stream.Read().status_code(), 3);

  stream.Send(Chunk(9));
  const v1::ScoreResponse good = stream.Read();
  EXPECT_EQ(good.chunk_id(), 9U);
  EXPECT_EQ(good.status_code(), 0);
}

TEST(ScoreStreamTest, NamesTheChunkOfAParsingErrorThatPrecedesItsId) {
  TransportServer server;
  TestStream stream(server.channel);
  v1::ScoreRequest chunk = Chunk(7);
  chunk.set_request_id(std::string(200, 'a'));

  stream.Send(chunk);

  const v1::ScoreResponse response = stream.Read();
  EXPECT_EQ(response.chunk_id(), 7U);
  EXPECT_EQ(response.status_message(), "request_id: 200 bytes, must be at most 128");
}

TEST(ScoreStreamTest, SendsTheRetryHintWithTheChunk) {
  TransportServer server;
  server.head->RefuseWith(
      WithRetryAfter(absl::ResourceExhaustedError("queue is full"), absl::Milliseconds(15)));
  TestStream stream(server.channel);

  stream.Send(Chunk(1));

  const v1::ScoreResponse response = stream.Read();
  EXPECT_EQ(response.status_code(), 8);
  EXPECT_EQ(response.retry_after_ms(), 15U);
}

TEST(ScoreStreamTest, ReadsNoMoreThanTheWindowWhileNothingIsAnswered) {
  TransportServer server;  // a window of 4
  server.head->Hold();
  TestStream stream(server.channel);
  for (uint64_t id = 1; id <= 12; ++id) {
    stream.Send(Chunk(id));
  }
  server.head->WaitForSubmitted(4);
  // After a round trip through the same server a fifth chunk would have arrived.
  grpc::ClientContext context;
  v1::ListHeadsResponse heads;
  ASSERT_TRUE(server.stub->ListHeads(&context, {}, &heads).ok());
  EXPECT_EQ(server.head->num_submitted(), 4);

  server.head->Release();
  stream.CloseWrites();

  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(stream.Read().status_code(), 0);
  }
  EXPECT_TRUE(stream.Finish().ok());
  EXPECT_EQ(server.head->num_submitted(), 12);
}

constexpr int kLargeAnswers = 64;

HeadInfo LargeAnswersInfo() {
  HeadInfo info = FakeHeadInfo();
  info.limits.request_rows_max = 8'192;
  info.limits.message_bytes_max = 8 << 20;
  return info;
}

/// Sends kLargeAnswers chunks with answers of 1 MiB. If nobody reads, flow control stops the server
/// long before all of them are written.
void SendForLargeAnswers(TestStream& stream) {
  v1::ScoreRequest chunk;
  chunk.set_dtype(v1::DTYPE_BF16);
  chunk.set_rows(8'192);
  chunk.set_hidden_size(8);
  chunk.set_targets(BytesOf(std::vector<int32_t>(8'192, 1)));
  chunk.set_hidden(std::string(8'192 * 16, '\0'));
  chunk.set_top_k(16);
  for (int i = 0; i < kLargeAnswers; ++i) {
    stream.Send(chunk);
  }
}

// Regression: unread answers filled the answer budget for as long as their clients liked.
TEST(ScoreStreamTest, AClientThatDoesNotReadIsCancelledInTheEnd) {
  FakeClock clock;
  TransportServer server(TestServerOptions(), LargeAnswersInfo(), /*with_head=*/true, clock);
  TestStream stream(server.channel);
  SendForLargeAnswers(stream);
  server.head->WaitForSubmitted(4);

  do {
    clock.Advance(2 * UnreadAnswers::kTimeMax);
  } while (server.server->CancelUnreadAnswers() == 0);

  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_LT(server.head->num_submitted(), kLargeAnswers);
}

TEST(ScoreStreamTest, AClientThatDoesNotReadIsBounded) {
  TransportServer server(TestServerOptions(), LargeAnswersInfo());
  TestStream stream(server.channel);
  SendForLargeAnswers(stream);
  server.head->WaitForSubmitted(4);

  // The server still serves other clients.
  auto other = v1::Scoring::NewStub(server.NewChannel());
  for (int i = 0; i < 200; ++i) {
    grpc::ClientContext context;
    v1::ScoreResponse response;
    ASSERT_TRUE(other->Score(&context, ValidRequest(), &response).ok());
  }
  EXPECT_LT(server.head->num_submitted(), 200 + kLargeAnswers);

  // When the client reads, it gets all answers.
  stream.CloseWrites();
  for (int i = 0; i < kLargeAnswers; ++i) {
    EXPECT_EQ(stream.Read().status_code(), 0);
  }
  EXPECT_TRUE(stream.Finish().ok());
}

TEST(ScoreStreamTest, CancelsOpenChunksWhenItsClientLeaves) {
  TransportServer server;
  server.head->Hold();
  {
    TestStream stream(server.channel);
    for (uint64_t id = 1; id <= 6; ++id) {
      stream.Send(Chunk(id));
    }
    server.head->WaitForSubmitted(4);
    stream.Cancel();
    server.head->WaitForCancelled(4);
    EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_EQ(server.head->num_waiting(), 0);

  server.head->Release();
  TestStream next(server.channel);
  next.Send(Chunk(1));
  EXPECT_EQ(next.Read().status_code(), 0);
}

TEST(ScoreStreamTest, AnswersOpenChunksWhenTheClientHalfCloses) {
  TransportServer server;
  server.head->Hold();
  TestStream stream(server.channel);
  stream.Send(Chunk(1));
  stream.CloseWrites();
  server.head->WaitForSubmitted(1);

  server.head->Release();

  EXPECT_EQ(stream.Read().chunk_id(), 1U);
  EXPECT_TRUE(stream.Finish().ok());
}

TEST(ScoreStreamTest, AnEmptyStreamEndsWithOk) {
  TransportServer server;
  TestStream stream(server.channel);
  stream.CloseWrites();
  EXPECT_TRUE(stream.Finish().ok());
}

// Regression: each stream of a client could hold a full window of unsent answers.
TEST(ScoreStreamTest, AnAnswerCountsAgainstTheClientsOtherStreamsUntilItIsSent) {
  GrpcServer::Options options = TestServerOptions();
  options.answers.bytes_max = 8;  // one row's logprob and entropy
  options.answers.client_share_max = 1;
  TransportServer server(options);
  server.head->Hold();
  TestStream first(server.channel);
  first.Send(Chunk(1));
  server.head->WaitForSubmitted(1);

  TestStream other(server.channel);
  other.Send(Chunk(2));
  const v1::ScoreResponse refused = other.Read();
  server.head->Release();
  EXPECT_EQ(first.Read().status_code(), 0U);
  first.CloseWrites();
  EXPECT_TRUE(first.Finish().ok());
  other.Send(Chunk(3));

  EXPECT_EQ(refused.status_code(), static_cast<uint32_t>(grpc::StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_GT(refused.retry_after_ms(), 0U);
  EXPECT_EQ(other.Read().status_code(), 0U);
}

TEST(ScoreStreamTest, AnAnswerThatWasSentCountsNoMoreAlsoIfItsStreamGoesOn) {
  GrpcServer::Options options = TestServerOptions();
  options.answers.bytes_max = 8;  // one row's logprob and entropy
  options.answers.client_share_max = 1;
  TransportServer server(options);
  TestStream first(server.channel);
  first.Send(Chunk(1));
  EXPECT_EQ(first.Read().status_code(), 0);

  TestStream other(server.channel);
  const absl::Time end = absl::Now() + absl::Seconds(20);
  uint32_t code = 1;
  while (code != 0 && absl::Now() < end) {  // the server learns of the sending after the client
    other.Send(Chunk(2));
    code = other.Read().status_code();
  }

  EXPECT_EQ(code, 0U);
}

TEST(ScoreStreamTest, AnswersThatWaitToBeWrittenCountToo) {
  GrpcServer::Options options = TestServerOptions();
  constexpr int64_t kAnswerBytes = 8'192 * (8 + 16 * 8);
  options.answers.bytes_max = 3 * kAnswerBytes;
  options.answers.client_share_max = 1;
  TransportServer server(options, LargeAnswersInfo());
  TestStream stream(server.channel);
  SendForLargeAnswers(stream);
  stream.CloseWrites();
  server.head->WaitForSubmitted(3);

  // The window has four chunks, and nobody reads: so one chunk has found no room.
  int refused = 0;
  for (int i = 0; i < kLargeAnswers; ++i) {
    refused += stream.Read().status_code() == grpc::StatusCode::RESOURCE_EXHAUSTED ? 1 : 0;
  }

  EXPECT_GT(refused, 0);
  EXPECT_TRUE(stream.Finish().ok());
}

class StreamWindowTest : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(StreamWindowTest, IsTheSmallestOfAllHeadsAndAtLeastOne) {
  HeadInfo info = FakeHeadInfo();
  info.limits.stream_window = GetParam()[0];
  TransportServer server(TestServerOptions(), info);
  HeadInfo other = FakeHeadInfo();
  other.name = "other";
  other.limits.stream_window = GetParam()[1];
  server.registry.Add(std::make_shared<FakeHead>(other));
  server.head->Hold();
  TestStream stream(server.channel);
  constexpr int kChunks = 12;
  for (uint64_t id = 1; id <= kChunks; ++id) {
    v1::ScoreRequest chunk = Chunk(id);
    chunk.set_head("fake");
    stream.Send(chunk);
  }
  const int window = GetParam()[2];
  server.head->WaitForSubmitted(window);
  // After a round trip through the same server one more chunk would have arrived.
  grpc::ClientContext context;
  v1::ListHeadsResponse heads;
  ASSERT_TRUE(server.stub->ListHeads(&context, {}, &heads).ok());

  EXPECT_EQ(server.head->num_submitted(), window);

  server.head->Release();
  for (int i = 0; i < kChunks; ++i) {
    EXPECT_EQ(stream.Read().status_code(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Windows, StreamWindowTest,
                         ::testing::Values(std::vector{4, 2, 2}, std::vector{2, 4, 2},
                                           std::vector{3, 3, 3}, std::vector{0, 4, 1}));

TEST(ScoreStreamTest, ACancelBeforeAChunkHasArrivedEndsTheStream) {
  TransportServer server;
  TestStream stream(server.channel);
  stream.Send(Chunk(1));
  EXPECT_EQ(stream.Read().chunk_id(), 1U);  // the server is receiving the next chunk

  stream.Cancel();

  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
  server.server->Shutdown(absl::InfiniteDuration());  // has no work to wait for
  EXPECT_EQ(server.head->num_submitted(), 1);
}

}  // namespace

}  // namespace logprobd::testing
