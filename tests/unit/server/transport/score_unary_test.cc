#include <chrono>
#include <string>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
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

TEST_F(ScoreUnaryTest, PassesTheMessageOnWithoutChange) {
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
  EXPECT_LE(left, absl::Minutes(61));  // the wire has three digits of it
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
  // Long enough to arrive on a busy machine; nothing ends the wait before it passes.
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

}  // namespace
}  // namespace logprobd::testing
