#include "client/cpp/score_call.h"

#include <grpcpp/support/slice.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/policy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "logprobd/v1/scoring.pb.h"
#include "tests/unit/client/cpp/fake_transport.h"
#include "tests/unit/client/cpp/score_case.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ScoreCallTest : public ::testing::Test {
 protected:
  void Start(const ScoreArgs& args, int32_t max_inflight) {
    StartScoreCall(environment_, args,
                   {.limits = {.request_rows_max = 2},
                    .request_bytes = 1 << 20,
                    .max_inflight = max_inflight,
                    .timeout = absl::Seconds(1)},
                   [this](absl::StatusOr<ScoreResult> result) { result_ = std::move(result); });
  }

  /// Returns the answer to a chunk of `rows` rows whose logprobs all equal `logprob`.
  static RpcReply Scores(uint32_t rows, float logprob, uint64_t weights_version = 0) {
    v1::ScoreResponse response;
    response.set_rows(rows);
    response.set_weights_version(weights_version);
    const std::vector<float> values(rows, logprob);
    response.set_logprob(
        std::string(reinterpret_cast<const char*>(values.data()), rows * sizeof(float)));
    const grpc::Slice slice(response.SerializeAsString());
    return {.status = absl::OkStatus(), .body = grpc::ByteBuffer(&slice, 1)};
  }

  FakeTransport transport_;
  Balance balance_{
      {.solo = true, .now = [this] { return transport_.Now(); }, .unit_random = [] { return 0.5; }},
      {"host:1"}};
  CallEnvironment environment_ = {.transport = &transport_,
                                  .retry = {.attempts_max = 3, .overloaded_attempts_max = 3},
                                  .address = "host:1",
                                  .unit_random = [] { return 0.5; },
                                  .balance = &balance_};
  std::optional<absl::StatusOr<ScoreResult>> result_;
};

TEST_F(ScoreCallTest, KeepsNoMoreThanItsWindowInFlight) {
  ScoreCase c(9);
  c.args.outputs = output::kLogprob;
  Start(c.args, /*max_inflight=*/2);
  EXPECT_EQ(transport_.calls.size(), 2U);

  while (transport_.calls.size() > 1) transport_.Reply(Scores(2, -1));
  transport_.Reply(Scores(1, -1));

  ASSERT_TRUE(result_.has_value());
  ASSERT_TRUE(result_->ok()) << result_->status();
  EXPECT_EQ(transport_.calls_max, 2U);
  EXPECT_EQ((*result_)->requests, 5);
}

TEST_F(ScoreCallTest, JoinsAnswersThatComeOutOfOrder) {
  ScoreCase c(5);
  c.args.outputs = output::kLogprob;
  std::vector<int64_t> progress;
  c.args.on_progress = [&](int64_t rows) { progress.push_back(rows); };
  Start(c.args, /*max_inflight=*/8);

  transport_.Reply(Scores(1, -3), /*index=*/2);
  transport_.Reply(Scores(2, -2), /*index=*/1);
  transport_.Reply(Scores(2, -1), /*index=*/0);

  ASSERT_TRUE(result_.has_value());
  ASSERT_TRUE(result_->ok()) << result_->status();
  EXPECT_THAT((*result_)->logprob, ElementsAre(-1, -1, -2, -2, -3));
  EXPECT_THAT(progress, ElementsAre(1, 3, 5));
}

TEST_F(ScoreCallTest, SaysWhichRowsARefusedRequestHeldAndCancelsTheRest) {
  ScoreCase c(6);
  Start(c.args, /*max_inflight=*/2);
  const auto scope = std::static_pointer_cast<FakeTransport::Scope>(transport_.calls[0].scope);

  transport_.Reply({.status = absl::InvalidArgumentError("targets[1] is 7")}, /*index=*/1);
  EXPECT_TRUE(scope->is_cancelled());
  EXPECT_FALSE(result_.has_value());  // the other request still reads the caller's memory
  transport_.Reply({.status = absl::CancelledError("")});

  ASSERT_TRUE(result_.has_value());
  EXPECT_EQ(result_->status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(result_->status().message()),
              HasSubstr("rows 2 to 3 of this call; its row 0 is row 2"));
  EXPECT_EQ(transport_.calls_made, 2U);
}

TEST_F(ScoreCallTest, AsksAgainForWhatAnotherVersionScoredUntilTheVersionKeepsChanging) {
  ScoreCase c(4);
  c.args.outputs = output::kLogprob;
  Start(c.args, /*max_inflight=*/2);

  for (uint64_t version = 1; !transport_.calls.empty(); ++version) {
    ASSERT_LT(version, 20U);
    EXPECT_FALSE(result_.has_value());
    RpcReply reply = Scores(2, -1, version);
    reply.server = "host:1";
    transport_.Reply(std::move(reply));
  }

  ASSERT_TRUE(result_.has_value());
  EXPECT_EQ(result_->status().code(), absl::StatusCode::kAborted) << result_->status();
  EXPECT_EQ(transport_.calls_made, 2U + policy::kSwapRoundsMax - 1);
}

TEST_F(ScoreCallTest, CountsRetries) {
  ScoreCase c(2);
  c.args.outputs = output::kLogprob;
  Start(c.args, /*max_inflight=*/1);

  transport_.Reply({.status = absl::ResourceExhaustedError("full")});
  transport_.FireTimer();
  transport_.Reply(Scores(2, -1));

  ASSERT_TRUE(result_.has_value());
  ASSERT_TRUE(result_->ok()) << result_->status();
  EXPECT_EQ((*result_)->retries, 1);
}

TEST_F(ScoreCallTest, DeliversOnlyWhenTheTransportHasDroppedTheCallersMemory) {
  ScoreCase c(2);
  c.args.outputs = output::kLogprob;
  Start(c.args, /*max_inflight=*/1);
  grpc::ByteBuffer still_being_sent = transport_.calls[0].body;

  transport_.Reply(Scores(2, -1));
  EXPECT_FALSE(result_.has_value());
  still_being_sent.Clear();
  transport_.FireTimer();  // runs without gRPC's locks held

  ASSERT_TRUE(result_.has_value());
  EXPECT_TRUE(result_->ok());
}

}  // namespace
}  // namespace logprobd::client
