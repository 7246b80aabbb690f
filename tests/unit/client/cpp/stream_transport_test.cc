#include "client/cpp/stream_transport.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "logprobd/v1/scoring.pb.h"
#include "tests/unit/client/cpp/fake_stream.h"
#include "tests/unit/client/cpp/fake_transport.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kScore[] = "/logprobd.v1.Scoring/Score";

grpc::ByteBuffer Encode(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

template <typename Message>
Message Parse(grpc::ByteBuffer bytes) {
  Message message;
  grpc::ProtoBufferReader reader(&bytes);
  EXPECT_TRUE(message.ParseFromZeroCopyStream(&reader));
  return message;
}

class StreamTransportTest : public ::testing::Test {
 protected:
  /// Sends a request named `name` and returns the index of its outcome.
  size_t Send(const std::string& name, absl::Time deadline = absl::InfiniteFuture()) {
    v1::ScoreRequest request;
    request.set_request_id(name);
    replies_.emplace_back();
    transport_.Call(kScore, Encode(request.SerializeAsString()), deadline, scope_,
                    [this, index = replies_.size() - 1](RpcReply reply) {
                      replies_[index] = std::move(reply);
                    });
    return replies_.size() - 1;
  }

  FakeStreams::Stream& stream(size_t index = 0) { return *opener_.streams.at(index); }

  v1::ScoreRequest Sent(size_t index, size_t on_stream = 0) {
    return Parse<v1::ScoreRequest>(stream(on_stream).messages.at(index));
  }

  void Answer(v1::ScoreResponse response, uint64_t chunk_id, size_t on_stream = 0) {
    response.set_chunk_id(chunk_id);
    stream(on_stream).events.received(Encode(response.SerializeAsString()));
  }

  static v1::ScoreResponse Refusal(absl::StatusCode code, uint32_t retry_after_ms) {
    v1::ScoreResponse response;
    response.set_status_code(static_cast<int32_t>(code));
    response.set_status_message("refused");
    response.set_retry_after_ms(retry_after_ms);
    return response;
  }

  static v1::ScoreResponse Rows(uint32_t rows) {
    v1::ScoreResponse response;
    response.set_rows(rows);
    return response;
  }

  /// Ends all open streams, so that nothing refers to the transport any more.
  void TearDown() override {
    opener_.is_shut_down = true;
    for (const auto& stream : opener_.streams) {
      if (stream->events.ended) stream->End(absl::CancelledError("end of the test"));
    }
  }

  FakeTransport inner_;
  FakeStreams opener_;
  StreamTransport transport_{inner_, opener_, /*streams=*/1};
  std::shared_ptr<CancelScope> scope_ = transport_.NewScope();
  std::vector<std::optional<RpcReply>> replies_;
};

TEST_F(StreamTransportTest, SendsARequestAsAChunkWithAnIdOfItsOwn) {
  Send("a");
  Send("b");

  EXPECT_THAT(opener_.methods, ElementsAre("/logprobd.v1.Scoring/ScoreStream"));
  EXPECT_TRUE(stream().is_started);
  EXPECT_EQ(Sent(0).request_id(), "a");
  EXPECT_EQ(Sent(0).chunk_id(), 1U);
  EXPECT_EQ(Sent(1).request_id(), "b");
  EXPECT_EQ(Sent(1).chunk_id(), 2U);
}

TEST_F(StreamTransportTest, AddsTheTraceparentOfTheScope) {
  Send("a");
  scope_ = transport_.NewScope();
  scope_->traceparent = "00-";
  Send("b");

  EXPECT_EQ(Sent(0).traceparent(), "");
  EXPECT_EQ(Sent(1).traceparent(), "00-");
}

TEST_F(StreamTransportTest, SendsOtherRequestsThroughTheTransportBelow) {
  transport_.Call("/logprobd.v1.Scoring/ListHeads", {}, absl::InfiniteFuture(), scope_,
                  [](const RpcReply&) {});

  EXPECT_EQ(inner_.calls.size(), 1U);
  EXPECT_TRUE(opener_.streams.empty());
}

TEST_F(StreamTransportTest, GivesAnswersToTheirCallsInAnyOrder) {
  Send("a");
  Send("b");

  Answer(Rows(22), 2);
  EXPECT_FALSE(replies_[0].has_value());
  Answer(Rows(11), 1);

  EXPECT_EQ(Parse<v1::ScoreResponse>(replies_[0]->body).rows(), 11U);
  EXPECT_EQ(Parse<v1::ScoreResponse>(replies_[1]->body).rows(), 22U);
}

TEST_F(StreamTransportTest, FailsABadChunkAlone) {
  Send("bad");
  Send("good");

  Answer(Refusal(absl::StatusCode::kInvalidArgument, 0), 1);
  Answer(Rows(1), 2);

  EXPECT_EQ(replies_[0]->status, absl::InvalidArgumentError("refused"));
  EXPECT_EQ(replies_[0]->pushback, std::nullopt);
  EXPECT_TRUE(replies_[1]->status.ok());
}

TEST_F(StreamTransportTest, PassesOnWhenAChunkMayBeSentAgain) {
  Send("a");

  Answer(Refusal(absl::StatusCode::kResourceExhausted, 250), 1);

  EXPECT_EQ(replies_[0]->status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(replies_[0]->pushback, "250");
}

TEST_F(StreamTransportTest, KeepsAtMostAWindowUnanswered) {
  transport_.SetWindow(2);
  for (const char* name : {"a", "b", "c"}) Send(name);
  EXPECT_EQ(stream().messages.size(), 2U);

  Answer(Rows(1), 2);

  EXPECT_EQ(stream().messages.size(), 3U);
  EXPECT_EQ(Sent(2).request_id(), "c");
}

TEST_F(StreamTransportTest, SpreadsChunksOverItsStreams) {
  StreamTransport two(inner_, opener_, /*streams=*/2);
  const auto scope = two.NewScope();
  for (int i = 0; i < 4; ++i) {
    two.Call(kScore, {}, absl::InfiniteFuture(), scope, [](const RpcReply&) {});
  }

  ASSERT_EQ(opener_.streams.size(), 2U);
  EXPECT_EQ(stream(0).messages.size(), 2U);
  EXPECT_EQ(stream(1).messages.size(), 2U);
  TearDown();
}

TEST_F(StreamTransportTest, ClosesAStreamWhenAllIsAnsweredAndOpensAnother) {
  Send("a");
  Answer(Rows(1), 1);
  EXPECT_TRUE(stream().is_closed);

  Send("b");

  ASSERT_EQ(opener_.streams.size(), 2U);
  EXPECT_EQ(Sent(0, /*on_stream=*/1).request_id(), "b");
}

TEST_F(StreamTransportTest, EndsTheCallsOfABrokenStreamAndSendsTheRestOnANewOne) {
  transport_.SetWindow(1);
  Send("a");
  Send("waits");

  stream().End(absl::UnavailableError("connection reset"));

  EXPECT_EQ(replies_[0]->status, absl::UnavailableError("connection reset"));
  EXPECT_FALSE(replies_[1].has_value());
  EXPECT_EQ(Sent(0, /*on_stream=*/1).request_id(), "waits");
}

TEST_F(StreamTransportTest, CallsAStreamThatTheServerEndedUnavailable) {
  Send("a");

  stream().End(absl::OkStatus());

  EXPECT_EQ(replies_[0]->status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(StreamTransportTest, GivesUpAStreamThatBreaksTheProtocol) {
  Send("a");

  Answer(Rows(1), 77);
  EXPECT_TRUE(stream().is_cancelled);
  stream().End(absl::CancelledError(""));

  EXPECT_EQ(replies_[0]->status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(replies_[0]->status.message()), HasSubstr("chunk 77"));
}

TEST_F(StreamTransportTest, GivesUpAStreamThatSendsOtherMessages) {
  Send("a");

  stream().events.received(Encode("\xff\xff\xff"));
  stream().End(absl::CancelledError(""));

  EXPECT_EQ(replies_[0]->status, absl::InternalError("the server's answer is not a ScoreResponse"));
}

TEST_F(StreamTransportTest, EndsACallAtItsDeadlineAndKeepsTheStream) {
  Send("slow", inner_.now + absl::Seconds(1));
  Send("patient");
  EXPECT_THAT(inner_.delays, ElementsAre(absl::Seconds(1)));

  inner_.now += absl::Seconds(1);
  inner_.FireTimer();
  Answer(Rows(1), 1);  // comes too late, which is not an error
  Answer(Rows(1), 2);

  EXPECT_EQ(replies_[0]->status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(stream().is_cancelled);
  EXPECT_TRUE(replies_[1]->status.ok());
}

TEST_F(StreamTransportTest, GivesUpAStreamThatDoesNotTakeAChunkInTime) {
  Send("stuck", inner_.now + absl::Seconds(1));
  stream().unwritten = 1;

  inner_.now += absl::Seconds(1);
  inner_.FireTimer();

  EXPECT_TRUE(stream().is_cancelled);
}

// Regression: the expiry of the chunk ended its stream, and the stream's other chunks ended with
// CANCELLED.
TEST_F(StreamTransportTest, WithdrawsAChunkThatExpiresBeforeItIsSent) {
  Send("under way");
  Send("late", inner_.now + absl::Seconds(1));
  Send("patient");
  stream().unwritten = 3;

  inner_.now += absl::Seconds(1);
  inner_.FireTimer();

  EXPECT_EQ(replies_[1]->status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(stream().withdrawn, ElementsAre(1));
  EXPECT_FALSE(stream().is_cancelled);
  Answer(Rows(1), 1);
  Answer(Rows(3), 3);
  EXPECT_TRUE(replies_[0]->status.ok());
  EXPECT_TRUE(replies_[2]->status.ok());
  EXPECT_TRUE(stream().is_closed);
}

TEST_F(StreamTransportTest, AWithdrawnChunkFreesItsRoomInTheWindow) {
  transport_.SetWindow(2);
  Send("under way");
  Send("late", inner_.now + absl::Seconds(1));
  Send("waits");
  stream().unwritten = 2;

  inner_.now += absl::Seconds(1);
  inner_.FireTimer();

  ASSERT_EQ(stream().messages.size(), 3U);
  EXPECT_EQ(Sent(2).request_id(), "waits");
}

// Regression: the other chunks ended with CANCELLED, which is not retried.
TEST_F(StreamTransportTest, SendsTheOthersAgainWhenAChunkIsStuckHalfWay) {
  Send("answered soon");
  Send("stuck", inner_.now + absl::Seconds(1));
  Send("queued");
  stream().unwritten = 2;

  inner_.now += absl::Seconds(1);
  inner_.FireTimer();
  ASSERT_EQ(opener_.streams.size(), 2U);
  Answer(Rows(9), 1);  // comes from the stream that was given up
  stream().End(absl::CancelledError(""));

  EXPECT_EQ(replies_[1]->status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Sent(0, /*on_stream=*/1).request_id(), "answered soon");
  EXPECT_EQ(Sent(1, /*on_stream=*/1).request_id(), "queued");
  EXPECT_FALSE(replies_[0].has_value());
  Answer(Rows(1), 1, /*on_stream=*/1);
  Answer(Rows(3), 3, /*on_stream=*/1);
  EXPECT_EQ(Parse<v1::ScoreResponse>(replies_[0]->body).rows(), 1U);
  EXPECT_TRUE(replies_[2]->status.ok());
}

// Regression: unsent chunks of a failed call were still sent, and kept its caller's memory in use.
TEST_F(StreamTransportTest, WithdrawsTheUnsentChunksOfACancelledScope) {
  const auto mine = scope_;
  Send("under way", inner_.now + absl::Seconds(1));
  Send("unsent", inner_.now + absl::Seconds(1));
  scope_ = transport_.NewScope();
  Send("theirs");
  stream().unwritten = 3;

  mine->Cancel();

  EXPECT_EQ(replies_[0]->status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(replies_[1]->status.code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(stream().withdrawn, ElementsAre(1));
  EXPECT_FALSE(stream().is_cancelled);
  inner_.now += absl::Seconds(1);
  inner_.FireTimer();  // the connection has not taken "under way" by its deadline
  EXPECT_TRUE(stream().is_cancelled);
  EXPECT_EQ(Sent(0, /*on_stream=*/1).request_id(), "theirs");
}

TEST_F(StreamTransportTest, AnUnansweredChunkTakesRoomInTheWindowAfterItsCallHasEnded) {
  transport_.SetWindow(1);
  Send("slow", inner_.now + absl::Seconds(1));
  Send("next");

  inner_.now += absl::Seconds(1);
  inner_.FireTimer();
  EXPECT_EQ(stream().messages.size(), 1U);
  Answer(Rows(1), 1);

  EXPECT_EQ(stream().messages.size(), 2U);
}

TEST_F(StreamTransportTest, CancelsTheChunksOfAScopeAlone) {
  Send("mine");
  const auto other = std::exchange(scope_, transport_.NewScope());
  Send("theirs");

  other->Cancel();

  EXPECT_EQ(replies_[0]->status.code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(replies_[1].has_value());
}

TEST_F(StreamTransportTest, RefusesWhatIsSentInACancelledScope) {
  scope_->Cancel();

  Send("a");

  EXPECT_EQ(replies_[0]->status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(opener_.streams.empty());
}

TEST_F(StreamTransportTest, EndsEverythingWhenItIsShutDown) {
  transport_.SetWindow(1);
  Send("sent", inner_.now + absl::Seconds(1));
  Send("waits", inner_.now + absl::Seconds(1));

  opener_.is_shut_down = true;
  inner_.FireTimer();  // all timers fire early
  stream().End(absl::CancelledError(""));

  EXPECT_EQ(replies_[0]->status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(replies_[1]->status.code(), absl::StatusCode::kCancelled);
}

TEST_F(StreamTransportTest, DropsTheMemoryOfARequestThatEndsBeforeItIsSent) {
  transport_.SetWindow(1);
  Send("first");
  const auto scope = transport_.NewScope();
  bool is_dropped = false;
  char bytes[] = "\x0a\x01x";
  {
    const grpc::Slice slice(
        bytes, 3, [](void* dropped) { *static_cast<bool*>(dropped) = true; }, &is_dropped);
    transport_.Call(kScore, grpc::ByteBuffer(&slice, 1), absl::InfiniteFuture(), scope,
                    [](const RpcReply&) {});
  }
  EXPECT_FALSE(is_dropped);

  scope->Cancel();

  EXPECT_TRUE(is_dropped);
}

}  // namespace
}  // namespace logprobd::client
