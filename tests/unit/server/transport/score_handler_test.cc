#include "server/transport/score_handler.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_head.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class ScoreHandlerTest : public ::testing::Test {
 protected:
  ScoreHandlerTest() { registry_.Add(head_); }

  std::optional<Submission> Start(const v1::ScoreRequest& request) {
    return handler_.Start(BufferOf(request.SerializeAsString()), call_, Metrics::Method::kScore,
                          [this](ScoreReply reply) {
                            EXPECT_FALSE(reply_.has_value()) << "answered twice";
                            reply_ = std::move(reply);
                          });
  }

  /// Returns the value of a series of the Prometheus output.
  double Metric(const std::string& series) const {
    const std::string text = absl::StrCat("\n", metrics_.Serialize());
    const size_t begin = text.find(absl::StrCat("\n", series, " "));
    return begin == std::string::npos ? -1 : std::stod(text.substr(begin + series.size() + 2));
  }
  double Rejected(const std::string& reason) const {
    return Metric(absl::StrCat("logprobd_rejected_total{reason=\"", reason, "\"}"));
  }

  FakeClock clock_;
  std::shared_ptr<FakeHead> head_ = std::make_shared<FakeHead>();
  FakeRegistry registry_;
  Metrics metrics_{Metrics::Options{.heads = {"fake"}}};
  ScoreHandler handler_{registry_, metrics_, clock_};
  CallInfo call_;
  std::optional<ScoreReply> reply_;
};

TEST_F(ScoreHandlerTest, PassesTheCallInfoToTheHead) {
  call_.client_id = "trainer";
  call_.client_share = 0.25;
  call_.deadline = clock_.Now() + absl::Seconds(3);
  const v1::ScoreRequest request = ValidRequest();

  EXPECT_TRUE(Start(request).has_value());

  EXPECT_EQ(head_->last_request().client_share, 0.25);
  EXPECT_EQ(head_->last_request().message_bytes, static_cast<int64_t>(request.ByteSizeLong()));

  EXPECT_EQ(head_->last_request().client_id, "trainer");
  EXPECT_EQ(head_->last_request().deadline, call_.deadline);
  EXPECT_EQ(head_->last_request().received, clock_.Now());
  ASSERT_TRUE(reply_.has_value());
  EXPECT_TRUE(reply_->status.ok());
  EXPECT_EQ(reply_->request_id, "test");
}

TEST_F(ScoreHandlerTest, PassesTheSubClientToTheHead) {
  call_.client_id = "team";
  call_.sub_client_id = "trainer";

  Start(ValidRequest());

  EXPECT_EQ(head_->last_request().client_id, "team");
  EXPECT_EQ(head_->last_request().sub_client_id, "trainer");
}

// A reload of the tokens may come between the check of a call and its first message.
TEST_F(ScoreHandlerTest, RefusesACallWhoseCallerIsNoLongerKnown) {
  call_.access = absl::UnauthenticatedError("authorization: the server does not know this token");

  EXPECT_FALSE(Start(ValidRequest()).has_value());

  ASSERT_TRUE(reply_.has_value());
  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(head_->num_submitted(), 0);
  EXPECT_EQ(Rejected("unauthenticated"), 1);
}

TEST_F(ScoreHandlerTest, RefusesAPriorityAboveThatOfTheCaller) {
  call_.priority_max = Priority::kNormal;
  v1::ScoreRequest request = ValidRequest();
  const auto code_with = [&](v1::Priority priority) {
    request.set_priority(priority);
    reply_.reset();
    Start(request);
    return reply_->status.code();
  };

  EXPECT_EQ(code_with(v1::PRIORITY_UNSPECIFIED), absl::StatusCode::kOk);
  EXPECT_EQ(code_with(v1::PRIORITY_NORMAL), absl::StatusCode::kOk);
  EXPECT_EQ(code_with(v1::PRIORITY_LOW), absl::StatusCode::kOk);
  EXPECT_EQ(code_with(v1::PRIORITY_HIGH), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Rejected("permission_denied"), 1);
  EXPECT_EQ(head_->num_submitted(), 3);

  request.set_request_id(std::string(200, 'a'));  // what is malformed is told before
  EXPECT_EQ(code_with(v1::PRIORITY_HIGH), absl::StatusCode::kInvalidArgument);
}

TEST_F(ScoreHandlerTest, CountsARequestByItsMethodItsHeadAndItsTime) {
  head_->Hold();
  v1::ScoreRequest request = ValidRequest();
  handler_.Start(BufferOf(request.SerializeAsString()), call_, Metrics::Method::kScoreStream,
                 [](ScoreReply) {});
  clock_.Advance(absl::Seconds(2));
  head_->Release();

  constexpr char kOk[] = R"(logprobd_requests_total{code="OK",head="fake",method="ScoreStream"})";
  EXPECT_EQ(Metric(kOk), 1);
  EXPECT_EQ(Metric("logprobd_request_duration_seconds_sum{head=\"fake\",method=\"ScoreStream\","
                   "transport=\"tcp\"}"),
            2);
  EXPECT_EQ(Metric(R"(logprobd_stage_duration_seconds_count{stage="receive"})"), 1);

  // A request that is refused before its head is looked for counts for the head that it names.
  handler_.RefuseNew();
  request.set_head("fake");
  Start(request);
  EXPECT_EQ(Metric(R"(logprobd_requests_total{code="UNAVAILABLE",head="fake",method="Score"})"), 1);
  EXPECT_EQ(Metric(R"(logprobd_stage_duration_seconds_count{stage="receive"})"), 2);
}

TEST_F(ScoreHandlerTest, AsksToComeBackInASecondWhileTheHeadIsNotReady) {
  head_->SetReady(false);

  Start(ValidRequest());

  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(reply_->status.message(), "head \"fake\" is not ready");
  EXPECT_EQ(RetryAfter(reply_->status), absl::Seconds(1));
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
  call_.deadline = clock_.Now() + absl::Seconds(1);
  const std::optional<Submission> submission = Start(ValidRequest());
  clock_.Advance(absl::Seconds(1));

  submission->Cancel();

  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ScoreHandlerTest, ACancelledRequestInTimeIsCancelled) {
  head_->Hold();
  call_.deadline = clock_.Now() + absl::Seconds(1);
  const std::optional<Submission> submission = Start(ValidRequest());

  submission->Cancel();

  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kCancelled);
}

TEST_F(ScoreHandlerTest, RefusesNewRequestsAfterRefuseNew) {
  handler_.RefuseNew();

  EXPECT_FALSE(Start(ValidRequest()).has_value());

  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(head_->num_submitted(), 0);
}

TEST_F(ScoreHandlerTest, LogsTheFieldOfARefusalButNoValues) {
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

TEST_F(ScoreHandlerTest, ARequestCancelledByGrpcJustBeforeItsDeadlineIsLate) {
  head_->Hold();
  call_.deadline = clock_.Now() + absl::Seconds(1);
  const std::optional<Submission> submission = Start(ValidRequest());
  clock_.Advance(absl::Seconds(1) - absl::Milliseconds(2));

  submission->Cancel();

  EXPECT_EQ(reply_->status.code(), absl::StatusCode::kDeadlineExceeded);
}

constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
constexpr char kOtherTraceparent[] = "00-11111111111111111111111111111111-2222222222222222-00";

TEST_F(ScoreHandlerTest, ATraceparentOfTheRequestReplacesThatOfTheCallIfItIsValid) {
  call_.trace_context = TraceContext::Parse(kTraceparent);
  v1::ScoreRequest request = ValidRequest();
  const auto seen = [&] {
    reply_.reset();
    Start(request);
    return std::string(head_->last_request().trace_context.traceparent());
  };

  EXPECT_EQ(seen(), kTraceparent);
  request.set_traceparent("00-not-valid");
  EXPECT_EQ(seen(), kTraceparent);
  request.set_traceparent(kOtherTraceparent);
  EXPECT_EQ(seen(), kOtherTraceparent);
}

TEST_F(ScoreHandlerTest, LogsTheTraceOfAFailedRequest) {
  head_->AnswerWith(absl::InternalError("the device is gone"));
  call_.trace_context = TraceContext::Parse(kTraceparent);
  ::testing::internal::CaptureStderr();

  Start(ValidRequest());

  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr(" trace_id=4bf92f3577b34da6a3ce929d0e0e4736"));
}

TEST_F(ScoreHandlerTest, LogsNoTraceIdOfARequestWithoutATrace) {
  head_->AnswerWith(absl::InternalError("the device is gone"));
  ::testing::internal::CaptureStderr();

  Start(ValidRequest());

  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("the device is gone"), Not(HasSubstr("trace_id"))));
}

TEST_F(ScoreHandlerTest, RepliesWithATraceOnRequest) {
  head_->Hold();
  v1::ScoreRequest request = ValidRequest();
  request.set_trace(true);
  request.set_traceparent(kTraceparent);
  const absl::Time received = clock_.Now();
  const absl::Time wall_before = WallNow();
  Start(request);

  clock_.Advance(absl::Seconds(3));
  head_->Release();

  const absl::Time wall_after = WallNow();
  ASSERT_TRUE(reply_->trace.has_value());
  EXPECT_EQ(reply_->trace->context.traceparent(), kTraceparent);
  EXPECT_EQ(reply_->trace->received, received);
  EXPECT_EQ(reply_->trace->replied, received + absl::Seconds(3));
  // The fake clock is 3 s ahead of the wall clock.
  EXPECT_GE(reply_->trace->received_wall, wall_before - absl::Seconds(3));
  EXPECT_LE(reply_->trace->received_wall, wall_after - absl::Seconds(3));
  EXPECT_EQ(reply_->result.times.submitted, received + absl::Microseconds(1));
}

TEST_F(ScoreHandlerTest, RepliesWithoutATraceIfNobodyAsksOrTheRequestFails) {
  v1::ScoreRequest request = ValidRequest();
  request.set_traceparent(kTraceparent);
  Start(request);
  EXPECT_FALSE(reply_->trace.has_value());

  request.set_trace(true);
  head_->AnswerWith(absl::InternalError("the device is gone"));
  reply_.reset();
  Start(request);
  EXPECT_FALSE(reply_->trace.has_value());
}

// Regression: "invalid" was counted twice, and refusals during loading were not counted.
TEST_F(ScoreHandlerTest, CountsEveryRefusalOnce) {
  const auto refuse = [this](const absl::Status& status) {
    head_->RefuseWith(status);
    reply_.reset();
    EXPECT_FALSE(Start(ValidRequest()).has_value());
  };
  refuse(absl::InvalidArgumentError("rows: too many"));
  refuse(WithRejection(absl::ResourceExhaustedError("full"), Rejection::kClientShare));
  refuse(absl::DeadlineExceededError("late"));
  head_->RefuseWith(absl::OkStatus());
  head_->SetReady(false);
  reply_.reset();
  Start(ValidRequest());
  v1::ScoreRequest request = ValidRequest();
  request.set_head("nobody");
  reply_.reset();
  Start(request);
  FakeRegistry loading;
  ScoreHandler early(loading, metrics_, clock_);
  early.Start(BufferOf(ValidRequest().SerializeAsString()), call_, Metrics::Method::kScore,
              [](ScoreReply) {});
  handler_.RefuseNew();
  reply_.reset();
  Start(ValidRequest());

  EXPECT_EQ(Rejected("invalid"), 2);  // no such head, too
  EXPECT_EQ(Rejected("client_share"), 1);
  EXPECT_EQ(Rejected("deadline"), 1);
  EXPECT_EQ(Rejected("not_ready"), 2);
  EXPECT_EQ(Rejected("draining"), 1);
}

// Regression: 120 answers for a client that did not read took 1.3 GB.
TEST_F(ScoreHandlerTest, BoundsTheAnswersThatAreNotSent) {
  ScoreHandler handler(registry_, metrics_, clock_, {.bytes_max = 32, .client_share_max = 1});
  std::vector<ScoreReply> replies;
  const auto start = [&] {
    handler.Start(BufferOf(ValidRequest().SerializeAsString()), call_, Metrics::Method::kScore,
                  [&](ScoreReply reply) { replies.push_back(std::move(reply)); });
  };

  for (int i = 0; i < 3; ++i) {
    start();  // an answer of two rows has 16 bytes
  }
  ASSERT_EQ(replies.size(), 3U);
  EXPECT_TRUE(replies[1].status.ok());
  EXPECT_EQ(replies[2].status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(head_->num_submitted(), 2);
  EXPECT_EQ(Rejected("answer_bytes"), 1);
  replies.clear();  // sent
  start();

  EXPECT_TRUE(replies[0].status.ok());
}

TEST_F(ScoreHandlerTest, AClientHoldsItsOwnShareOfTheAnswers) {
  ScoreHandler handler(registry_, metrics_, clock_, {.bytes_max = 64, .client_share_max = 1});
  std::vector<ScoreReply> replies;
  const auto start = [&](const std::string& client, double share) {
    call_.client_id = client;
    call_.client_share = share;
    handler.Start(BufferOf(ValidRequest().SerializeAsString()), call_, Metrics::Method::kScore,
                  [&](ScoreReply reply) { replies.push_back(std::move(reply)); });
    return replies.back().status.code();
  };

  EXPECT_EQ(start("a", 0.25), absl::StatusCode::kOk);  // 16 bytes
  EXPECT_EQ(start("a", 0.25), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(start("b", 0.25), absl::StatusCode::kOk);
}

TEST_F(ScoreHandlerTest, HoldsNothingForAFailedRequest) {
  ScoreHandler handler(registry_, metrics_, clock_, {.bytes_max = 16, .client_share_max = 1});
  head_->AnswerWith(absl::InternalError("fault"));
  std::vector<ScoreReply> replies;

  for (int i = 0; i < 2; ++i) {
    handler.Start(BufferOf(ValidRequest().SerializeAsString()), call_, Metrics::Method::kScore,
                  [&](ScoreReply reply) { replies.push_back(std::move(reply)); });
  }

  EXPECT_EQ(replies[1].status.code(), absl::StatusCode::kInternal);
}

TEST_F(ScoreHandlerTest, LogsAnEngineErrorAndDoesNotSendItsDetails) {
  head_->AnswerWith(WithDetailsForLog(absl::ResourceExhaustedError("CUDA error 2")));
  ::testing::internal::CaptureStderr();

  Start(ValidRequest());

  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("CUDA error 2"));
}

}  // namespace
}  // namespace logprobd::testing
