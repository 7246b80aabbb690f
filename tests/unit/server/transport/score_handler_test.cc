#include "server/transport/score_handler.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/log.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_head.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

class ScoreHandlerTest : public ::testing::Test {
 protected:
  ScoreHandlerTest() { registry_.Add(head_); }

  std::optional<Submission> Start(const v1::ScoreRequest& request) {
    return handler_.Start(BufferOf(request.SerializeAsString()), facts_, Metrics::Method::kScore,
                          [this](ScoreReply reply) {
                            EXPECT_FALSE(reply_.has_value()) << "answered twice";
                            reply_ = std::move(reply);
                          });
  }

  FakeClock clock_;
  std::shared_ptr<FakeHead> head_ = std::make_shared<FakeHead>();
  FakeRegistry registry_;
  Metrics metrics_{Metrics::Options{.heads = {"fake"}}};
  ScoreHandler handler_{registry_, metrics_, clock_};
  CallFacts facts_;
  std::optional<ScoreReply> reply_;
};

TEST_F(ScoreHandlerTest, PassesOnWhatTheCallSays) {
  facts_.client_id = "trainer";
  facts_.deadline = clock_.Now() + absl::Seconds(3);

  EXPECT_TRUE(Start(ValidRequest()).has_value());

  EXPECT_EQ(head_->last_request().client_id, "trainer");
  EXPECT_EQ(head_->last_request().deadline, facts_.deadline);
  EXPECT_EQ(head_->last_request().received, clock_.Now());
  ASSERT_TRUE(reply_.has_value());
  EXPECT_TRUE(reply_->status.ok());
  EXPECT_EQ(reply_->request_id, "test");
}

TEST_F(ScoreHandlerTest, AnswersARefusedRequestOnceAndSubmitsNothing) {
  v1::ScoreRequest request = ValidRequest();
  request.set_top_k(1'000);

  EXPECT_FALSE(Start(request).has_value());

  ASSERT_TRUE(reply_.has_value());
  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(head_->num_submitted(), 0);
}

TEST_F(ScoreHandlerTest, ACancelledRequestWhoseDeadlineHasPassedIsLate) {
  head_->Hold();
  facts_.deadline = clock_.Now() + absl::Seconds(1);
  const std::optional<Submission> submission = Start(ValidRequest());
  clock_.Advance(absl::Seconds(1));

  submission->Cancel();

  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ScoreHandlerTest, ACancelledRequestInTimeIsCancelled) {
  head_->Hold();
  facts_.deadline = clock_.Now() + absl::Seconds(1);
  const std::optional<Submission> submission = Start(ValidRequest());

  submission->Cancel();

  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kCancelled);
}

TEST_F(ScoreHandlerTest, RefusesNewRequestsWhenTold) {
  handler_.RefuseNew();

  EXPECT_FALSE(Start(ValidRequest()).has_value());

  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(head_->num_submitted(), 0);
}

TEST_F(ScoreHandlerTest, LogsOfARefusalTheFieldButNoValues) {
  ConfigureLog({.level = LogLevel::kDebug});
  ::testing::internal::CaptureStderr();
  v1::ScoreRequest request = ValidRequest();
  request.set_targets(BytesOf<int32_t>({5, 77'777}));

  Start(request);

  const std::string log = ::testing::internal::GetCapturedStderr();
  ConfigureLog({});
  EXPECT_THAT(log, HasSubstr("request_id=test"));
  EXPECT_THAT(log, HasSubstr("reason=targets[1]"));
  EXPECT_THAT(log, Not(HasSubstr("77777")));
}

TEST_F(ScoreHandlerTest, BoundsTheLinesOfAnErrorStorm) {
  head_->AnswerWith(absl::InternalError("the device is gone"));
  ::testing::internal::CaptureStderr();

  for (int i = 0; i < 1'000; ++i) {
    reply_.reset();
    Start(ValidRequest());
  }

  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("the device is gone"));
  EXPECT_LE(std::count(log.begin(), log.end(), '\n'), 20);
}

}  // namespace
}  // namespace logprobd::testing
