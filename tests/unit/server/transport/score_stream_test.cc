#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "tests/support/test_stream.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

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

TEST(ScoreStreamTest, AnswersInTheOrderInWhichChunksAreDone) {
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

TEST(ScoreStreamTest, NamesTheChunkOfAParsingErrorThatComesBeforeItsId) {
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
  // A call that takes a round trip through the same server: the fifth would have come by then.
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

TEST(ScoreStreamTest, AClientThatDoesNotReadIsBounded) {
  HeadInfo info = FakeHeadInfo();
  info.limits.request_rows_max = 8'192;
  info.limits.message_bytes_max = 8 << 20;
  TransportServer server(TestServerOptions(), info);
  TestStream stream(server.channel);
  // Answers of 1 MiB: flow control stops them long before all are written.
  v1::ScoreRequest chunk;
  chunk.set_dtype(v1::DTYPE_BF16);
  chunk.set_rows(8'192);
  chunk.set_hidden_size(8);
  chunk.set_targets(BytesOf(std::vector<int32_t>(8'192, 1)));
  chunk.set_hidden(std::string(8'192 * 16, '\0'));
  chunk.set_top_k(16);
  constexpr int kChunks = 64;
  for (int i = 0; i < kChunks; ++i) {
    stream.Send(chunk);
  }
  server.head->WaitForSubmitted(4);

  // Others are served meanwhile.
  auto other = v1::Scoring::NewStub(server.NewChannel());
  for (int i = 0; i < 200; ++i) {
    grpc::ClientContext context;
    v1::ScoreResponse response;
    ASSERT_TRUE(other->Score(&context, ValidRequest(), &response).ok());
  }
  EXPECT_LT(server.head->num_submitted(), 200 + kChunks);

  // Once it reads, it gets all of them.
  stream.CloseWrites();
  for (int i = 0; i < kChunks; ++i) {
    EXPECT_EQ(stream.Read().status_code(), 0);
  }
  EXPECT_TRUE(stream.Finish().ok());
}

TEST(ScoreStreamTest, CancelsWhatIsOpenWhenItsClientLeaves) {
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

TEST(ScoreStreamTest, AnswersWhatIsOpenWhenTheClientHalfCloses) {
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

TEST(ScoreStreamTest, AnEmptyStreamEndsWell) {
  TransportServer server;
  TestStream stream(server.channel);
  stream.CloseWrites();
  EXPECT_TRUE(stream.Finish().ok());
}

// Each stream held its window of answers, however many streams a client opened.
TEST(ScoreStreamTest, AnAnswerCountsAgainstTheClientsOtherStreamsUntilItIsSent) {
  GrpcServer::Options options = TestServerOptions();
  options.answer_bytes_max = 8;  // one row's logprob and entropy
  options.answer_client_share = 1;
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

TEST(ScoreStreamTest, ACancelBeforeAChunkHasArrivedEndsTheStream) {
  TransportServer server;
  TestStream stream(server.channel);
  stream.Send(Chunk(1));
  EXPECT_EQ(stream.Read().chunk_id(), 1U);  // the next chunk is being received

  stream.Cancel();

  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
  server.server->Shutdown(absl::InfiniteDuration());  // nothing is left that it would wait for
  EXPECT_EQ(server.head->num_submitted(), 1);
}

}  // namespace
}  // namespace logprobd::testing
