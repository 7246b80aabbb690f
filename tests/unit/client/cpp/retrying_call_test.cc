#include "client/cpp/retrying_call.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/grpc_transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/app/options/options_parser.h"
#include "tests/unit/client/cpp/fake_transport.h"

namespace logprobd::client {
namespace {

constexpr double kHalf = 0.5;
const RetryPolicy kPolicy = {.attempts_max = 4,
                             .overloaded_attempts_max = 4,
                             .backoff_initial = absl::Milliseconds(100),
                             .backoff_max = absl::Milliseconds(300)};

TEST(RetryPolicyTest, DoublesTheRangeOfTheRandomDelayUpToItsBound) {
  const absl::Status full = absl::ResourceExhaustedError("full");

  EXPECT_EQ(kPolicy.NextDelay({.attempts = 1, .status = full}, kHalf), absl::Milliseconds(50));
  EXPECT_EQ(kPolicy.NextDelay({.attempts = 2, .status = full}, kHalf), absl::Milliseconds(100));
  EXPECT_EQ(kPolicy.NextDelay({.attempts = 3, .status = full}, kHalf), absl::Milliseconds(150));
  EXPECT_EQ(kPolicy.NextDelay({.attempts = 1, .status = full}, 0.0), absl::ZeroDuration());
}

TEST(RetryPolicyTest, GivesUpAfterItsRetries) {
  EXPECT_FALSE(kPolicy.NextDelay({.attempts = 4, .status = absl::UnavailableError("gone")}, kHalf));
}

TEST(RetryPolicyTest, RetriesOnlyUnavailableAndExhaustedServers) {
  EXPECT_TRUE(kPolicy.NextDelay({.status = absl::UnavailableError("gone")}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay({.status = absl::InvalidArgumentError("bad")}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay({.status = absl::DeadlineExceededError("late")}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay({.status = absl::InternalError("bug")}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay(
      {.status = absl::ResourceExhaustedError("Received message larger than max (9 vs. 4)")},
      kHalf));
}

TEST(RetryPolicyTest, DoesNotRetryARefusalOfThePlacement) {
  EXPECT_FALSE(kPolicy.NextDelay(
      {.status = absl::ResourceExhaustedError("cuda_ipc: 64 mappings are open")}, kHalf));
}

TEST(RetryPolicyTest, NeverReturnsBeforeTheServersHint) {
  for (const absl::Status& status :
       {absl::ResourceExhaustedError("full"), absl::UnavailableError("stopping")}) {
    EXPECT_EQ(kPolicy.NextDelay({.status = status, .pushback = absl::Seconds(2)}, 0.0),
              absl::Seconds(2));
    EXPECT_EQ(kPolicy.NextDelay({.status = status, .pushback = absl::Seconds(2)}, kHalf),
              absl::Milliseconds(2050));
  }
}

TEST(RetryPolicyTest, TakesANegativeOrMalformedHintAsNo) {
  const absl::Status full = absl::ResourceExhaustedError("full");

  EXPECT_FALSE(kPolicy.NextDelay({.status = full, .pushback = ParsePushback("-1")}, kHalf));
  EXPECT_FALSE(kPolicy.NextDelay({.status = full, .pushback = ParsePushback("soon")}, kHalf));
  EXPECT_TRUE(kPolicy.NextDelay({.status = full, .pushback = ParsePushback("0")}, kHalf));
}

TEST(RetryPolicyTest, WaitsForAnOverloadedServerLongerThanForOneThatIsGone) {
  const RetryPolicy usual;

  EXPECT_FALSE(usual.NextDelay(
      {.attempts = usual.attempts_max, .status = absl::UnavailableError("gone")}, kHalf));
  EXPECT_TRUE(usual.NextDelay(
      {.attempts = usual.attempts_max, .status = absl::ResourceExhaustedError("full")}, kHalf));
}

TEST(RetryPolicyTest, PlansNothingPastTheDeadline) {
  EXPECT_FALSE(kPolicy.NextDelay({.status = absl::UnavailableError("gone"),
                                  .pushback = absl::Milliseconds(500),
                                  .remaining = absl::Milliseconds(500)},
                                 0.0));
  EXPECT_TRUE(kPolicy.NextDelay({.status = absl::UnavailableError("gone"),
                                 .pushback = absl::Milliseconds(500),
                                 .remaining = absl::Milliseconds(501)},
                                0.0));
}

TEST(RetryPolicyTest, StaysFiniteAfterManyAttempts) {
  const RetryPolicy patient = {.attempts_max = 10'000, .backoff_max = absl::Seconds(5)};

  EXPECT_EQ(patient.NextDelay({.attempts = 9'999, .status = absl::UnavailableError("gone")}, kHalf),
            absl::Milliseconds(2500));
}

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class RetryingCallTest : public ::testing::Test {
 protected:
  void Start() {
    StartRetryingCall(environment_,
                      {.method = "/x/Y",
                       .request =
                           [this] {
                             ++encoded_;
                             return grpc::ByteBuffer();
                           },
                       .deadline = transport_.now + absl::Seconds(60),
                       .timeout = absl::Seconds(60),
                       .scope = transport_.NewScope()},
                      [this](CallOutcome outcome) { outcome_ = std::move(outcome); });
  }

  FakeTransport transport_;
  CallEnvironment environment_ = {.transport = &transport_,
                                  .retry = {.attempts_max = 3,
                                            .overloaded_attempts_max = 3,
                                            .backoff_initial = absl::Milliseconds(100),
                                            .backoff_max = absl::Seconds(1)},
                                  .address = "host:1",
                                  .unit_random = [] { return 0.5; }};
  int encoded_ = 0;
  std::optional<CallOutcome> outcome_;
};

TEST_F(RetryingCallTest, EncodesAgainAndGivesTheAnswerOfTheLastAttempt) {
  Start();

  transport_.Reply({.status = absl::UnavailableError("gone")});
  ASSERT_FALSE(outcome_.has_value());
  transport_.FireTimer();
  transport_.Reply({.status = absl::OkStatus()});

  ASSERT_TRUE(outcome_.has_value());
  EXPECT_TRUE(outcome_->status.ok());
  EXPECT_EQ(outcome_->attempts, 2);
  EXPECT_EQ(encoded_, 2);
}

TEST_F(RetryingCallTest, DoesNotWaitWhenAnotherServerIsReady) {
  environment_.retry.backoff_initial = environment_.retry.backoff_max = absl::Hours(1);
  Start();

  transport_.Reply({.status = absl::ResourceExhaustedError("full"),
                    .pushback = absl::Hours(1),
                    .can_go_elsewhere = true});

  EXPECT_THAT(transport_.delays, ElementsAre(absl::ZeroDuration()));
  transport_.FireTimer();
  transport_.Reply({.server = "b:2"});
  EXPECT_TRUE(outcome_->status.ok());
  EXPECT_EQ(outcome_->server, "b:2");
}

TEST_F(RetryingCallTest, CountsAttemptsElsewhereAsRetries) {
  Start();

  for (int i = 0; i < 2; ++i) {
    transport_.Reply({.status = absl::UnavailableError("gone"), .can_go_elsewhere = true});
    transport_.FireTimer();
  }
  transport_.Reply(
      {.status = absl::UnavailableError("gone"), .server = "b:2", .can_go_elsewhere = true});

  ASSERT_TRUE(outcome_.has_value());
  EXPECT_EQ(outcome_->attempts, 3);
  EXPECT_THAT(std::string(outcome_->status.message()), HasSubstr("ready at b:2"));
}

TEST_F(RetryingCallTest, TriesEveryServerForAPinnedVersionWhateverTheRetries) {
  environment_.retry.attempts_max = 1;
  Start();

  transport_.Reply({.status = absl::FailedPreconditionError("not live"), .can_go_elsewhere = true});
  transport_.FireTimer();
  transport_.Reply({.status = absl::AbortedError("nowhere"), .is_explained = true});

  ASSERT_TRUE(outcome_.has_value());
  EXPECT_EQ(std::string(outcome_->status.message()), "nowhere");
}

TEST_F(RetryingCallTest, ObeysARefusalOfRetriesElsewhereToo) {
  Start();

  transport_.Reply({.status = absl::ResourceExhaustedError("full"),
                    .pushback = -absl::Milliseconds(1),
                    .can_go_elsewhere = true});

  ASSERT_TRUE(outcome_.has_value());
  EXPECT_EQ(outcome_->attempts, 1);
}

TEST_F(RetryingCallTest, SendsNothingElsewhereAfterTheDeadline) {
  Start();
  transport_.now += absl::Seconds(60);

  transport_.Reply({.status = absl::UnavailableError("gone"), .can_go_elsewhere = true});

  ASSERT_TRUE(outcome_.has_value());
  EXPECT_EQ(outcome_->attempts, 1);
}

TEST_F(RetryingCallTest, WaitsAtLeastAsLongAsTheServerAsked) {
  Start();

  transport_.Reply(
      {.status = absl::ResourceExhaustedError("full"), .pushback = absl::Milliseconds(700)});
  transport_.FireTimer();
  transport_.Reply({.status = absl::ResourceExhaustedError("full")});

  EXPECT_THAT(transport_.delays, ElementsAre(absl::Milliseconds(750), absl::Milliseconds(100)));
}

TEST_F(RetryingCallTest, GivesUpWithTheNumberOfAttemptsAndAdvice) {
  Start();

  transport_.Reply({.status = absl::UnavailableError("refused")});
  transport_.FireTimer();
  transport_.Reply({.status = absl::UnavailableError("refused")});
  transport_.FireTimer();
  transport_.Reply({.status = absl::UnavailableError("refused")});

  ASSERT_TRUE(outcome_.has_value());
  EXPECT_EQ(outcome_->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(outcome_->status.message()),
              HasSubstr("refused (after 3 attempts in 0.0 s); check that logprobd runs and is "
                        "ready at host:1"));
}

TEST_F(RetryingCallTest, ReportsOnceThatItHasRetriedForASecond) {
  std::vector<std::string> messages;
  environment_.on_wait = [&messages](const std::string& message) { messages.push_back(message); };
  environment_.retry.attempts_max = 4;
  Start();

  transport_.now += absl::Milliseconds(900);
  transport_.Reply({.status = absl::UnavailableError("refused")});  // the next attempt is at 950 ms
  EXPECT_THAT(messages, IsEmpty());
  transport_.now += absl::Milliseconds(50);
  transport_.FireTimer();
  transport_.Reply({.status = absl::UnavailableError("refused")});  // the next is at 1,050 ms
  EXPECT_THAT(messages, ElementsAre("no answer from host:1 for 0.9 s; retrying: refused"));
  transport_.now += absl::Seconds(5);
  transport_.FireTimer();
  transport_.Reply({.status = absl::UnavailableError("refused")});

  EXPECT_THAT(messages, SizeIs(1));
}

TEST_F(RetryingCallTest, NamesTheTimeOfAllAttempts) {
  Start();
  for (int attempt = 0; attempt < 2; ++attempt) {
    transport_.now += absl::Milliseconds(1'500);
    transport_.Reply({.status = absl::UnavailableError("refused")});
    transport_.FireTimer();
  }
  transport_.Reply({.status = absl::UnavailableError("refused")});

  EXPECT_THAT(std::string(outcome_->status.message()),
              HasSubstr("(after 3 attempts in 3.0 s); check that logprobd runs and is ready at "
                        "host:1"));
}

TEST_F(RetryingCallTest, DoesNotRetryABadArgument) {
  Start();

  transport_.Reply({.status = absl::InvalidArgumentError("rows is 0")});

  ASSERT_TRUE(outcome_.has_value());
  EXPECT_EQ(outcome_->status.message(), "rows is 0");
  EXPECT_EQ(transport_.calls_made, 1U);
}

TEST_F(RetryingCallTest, StopsAtTheDeadline) {
  Start();
  transport_.now += absl::Milliseconds(59'990);

  transport_.Reply({.status = absl::UnavailableError("gone")});

  ASSERT_TRUE(outcome_.has_value());
  EXPECT_EQ(outcome_->attempts, 1);
}

TEST(ExplainStatusTest, SaysWhatToChange) {
  const auto explain = [](const absl::Status& status) {
    return std::string(ExplainStatus(status, "host:1", absl::Seconds(2), /*attempts=*/1).message());
  };

  EXPECT_THAT(explain(absl::DeadlineExceededError("late")), HasSubstr("within the timeout of 2s"));
  EXPECT_THAT(explain(absl::ResourceExhaustedError("full")), HasSubstr("fewer requests in flight"));
  EXPECT_THAT(explain(absl::ResourceExhaustedError("Received message larger than max")),
              HasSubstr("--max-message-bytes"));
  // Regression: the advice named a flag that the server does not have.
  EXPECT_THAT(HelpText(), HasSubstr("--max-message-bytes"));
  EXPECT_THAT(explain(absl::UnimplementedError("")), HasSubstr("is it the gRPC port"));
  EXPECT_THAT(explain(absl::UnavailableError("Trying to connect an http1.x server")),
              HasSubstr("is this the --http port?"));
  EXPECT_THAT(explain(absl::NotFoundError("x")), HasSubstr("logprobctl info"));
  EXPECT_THAT(explain(absl::FailedPreconditionError("x")), HasSubstr("weights_version to 0"));
}

}  // namespace
}  // namespace logprobd::client
