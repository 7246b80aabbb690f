// Tests a Client that sends its requests over ScoreStream to a server on the loopback interface.

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_scoring_service.h"
#include "tests/unit/client/cpp/score_case.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class BulkStreamTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect(Client::Options options = {}) {
    options.address = server_.address();
    options.backoff_initial = absl::Milliseconds(1);
    options.backoff_max = absl::Milliseconds(2);
    options.bulk_stream = true;
    return *Client::Create(options);
  }

  testing::FakeScoringService& service() { return server_.service(); }

  testing::FakeScoringServer server_;
};

TEST_F(BulkStreamTest, CutsALargeCallAndKeepsItsOrder) {
  const ScoreCase c(9'456);  // ten chunks of 1,000 rows, over four streams

  const absl::StatusOr<ScoreResult> result = Connect()->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_THAT(result->logprob, SizeIs(9'456));
  for (int64_t row = 0; row < c.args.rows; ++row) {
    ASSERT_EQ(result->logprob[static_cast<size_t>(row)], c.logprob(row)) << "row " << row;
  }
  EXPECT_EQ(result->requests, 10);
  EXPECT_EQ(service().requests().size(), 10U);
  EXPECT_GE(service().streams(), 1);
}

TEST_F(BulkStreamTest, SendsAChunkAgainThatTheServerWasTooBusyFor) {
  service().FailNext({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"}, "1");
  service().FailNext({grpc::StatusCode::UNAVAILABLE, "starting"});
  const ScoreCase c(10);

  const absl::StatusOr<ScoreResult> result = Connect()->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->retries, 2);
}

TEST_F(BulkStreamTest, FailsTheCallOfABadChunkAndServesTheNext) {
  service().FailNext({grpc::StatusCode::INVALID_ARGUMENT, "targets[1] is 101"});
  const ScoreCase c(10);
  const std::unique_ptr<Client> client = Connect();

  const absl::StatusOr<ScoreResult> bad = client->Score(c.args);
  const absl::StatusOr<ScoreResult> good = client->Score(c.args);

  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bad.status().message()), HasSubstr("targets[1] is 101"));
  EXPECT_TRUE(good.ok()) << good.status();
}

TEST_F(BulkStreamTest, StopsAtItsDeadline) {
  service().Hold();
  ScoreCase c(10);
  c.args.timeout = absl::Milliseconds(50);

  const absl::StatusOr<ScoreResult> result = Connect()->Score(c.args);

  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("within the timeout of 50ms"));
}

/// Makes the service stop reading once it holds a request, which blocks the client's stream.
class StuckStreamTest : public BulkStreamTest {
 protected:
  StuckStreamTest() {
    v1::Limits& limits = *service().heads().mutable_heads(0)->mutable_limits();
    limits.set_request_rows_max(40'000);
    limits.set_stream_window(100);
    client_ = Connect({.channels = 1, .max_inflight = 100});
    EXPECT_TRUE(client_->Score(small_.args).ok());
    service().Hold();
    client_->ScoreAsync(small_.args, [this](absl::StatusOr<ScoreResult> result) {
      first_ = result.status();
      first_ended_.Notify();
    });
    service().WaitForHeld(1);
  }

  /// Number of rows in 40 chunks of 32 MB in total, twice as much as flow control allows in flight.
  static constexpr int64_t kStuckRows = 40 * 40'000;

  const ScoreCase small_{10};
  absl::Status first_;
  absl::Notification first_ended_;
  std::unique_ptr<Client> client_;  // destroyed first, since its calls refer to the members above
};

// Regression: the other chunks of the stream ended with CANCELLED.
TEST_F(StuckStreamTest, AChunkThatExpiresBehindAStuckOneFailsAlone) {
  const ScoreCase large(kStuckRows);
  absl::Status stuck;
  absl::Notification stuck_ended;
  client_->ScoreAsync(large.args, [&](const absl::StatusOr<ScoreResult>& result) {
    stuck = result.status();
    stuck_ended.Notify();
  });
  ScoreCase late(10);
  late.args.timeout = absl::Milliseconds(50);

  const absl::Status status = client_->Score(late.args).status();
  service().Release();
  first_ended_.WaitForNotification();
  stuck_ended.WaitForNotification();

  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(first_.ok()) << first_;
  EXPECT_TRUE(stuck.ok()) << stuck;
  EXPECT_EQ(service().requests().size(), 2U + 40U);  // the late chunk is not among them
}

TEST_F(StuckStreamTest, AStuckChunkThatExpiresFailsAlone) {
  ScoreCase large(kStuckRows);
  large.args.timeout = absl::Milliseconds(50);

  const absl::Status status = client_->Score(large.args).status();
  service().Release();
  first_ended_.WaitForNotification();

  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(first_.ok()) << first_;
}

TEST_F(BulkStreamTest, CancelsWhatIsInFlightWhenItIsDestroyed) {
  service().Hold();
  const ScoreCase c(3'000);
  std::unique_ptr<Client> client = Connect();
  absl::Status status;
  client->ScoreAsync(c.args,
                     [&](const absl::StatusOr<ScoreResult>& result) { status = result.status(); });
  service().WaitForHeld(1);

  client.reset();

  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

TEST_F(BulkStreamTest, ServesManyThreads) {
  const std::unique_ptr<Client> client = Connect({.channels = 2});
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&client, thread] {
      const ScoreCase c(10 + thread);
      for (int call = 0; call < 20; ++call) {
        const absl::StatusOr<ScoreResult> result = client->Score(c.args);
        ASSERT_TRUE(result.ok()) << result.status();
        ASSERT_EQ(result->logprob.back(), c.logprob(9 + thread));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(service().requests().size(), 160U);
}

TEST_F(BulkStreamTest, SendsItsNameForFairness) {
  const ScoreCase c(1);

  ASSERT_TRUE(Connect({.client_id = "trainer-7"})->Score(c.args).ok());

  EXPECT_EQ(service().client_id(), "trainer-7");
}

TEST_F(BulkStreamTest, SendsTheTraceparentInTheMessages) {
  ScoreCase c(10);
  c.args.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  c.args.trace = true;
  const std::unique_ptr<Client> client = Connect();

  const absl::StatusOr<ScoreResult> result = client->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(service().traceparent(), "");
  EXPECT_EQ(service().requests()[0].traceparent(), c.args.traceparent);
  EXPECT_THAT(result->traces, SizeIs(1));
}

TEST_F(BulkStreamTest, UsesTheStreamsOfSeveralServersAndLeavesOneThatRefuses) {
  testing::FakeScoringServer other;
  other.service().FailNext({grpc::StatusCode::UNAVAILABLE, "draining"});
  const ScoreCase c(9'456);
  const auto client =
      Client::Create({.address = absl::StrCat(server_.address(), ",", other.address()),
                      .backoff_initial = absl::Milliseconds(1),
                      .backoff_max = absl::Milliseconds(2),
                      .bulk_stream = true});
  ASSERT_TRUE(client.ok()) << client.status();

  const absl::StatusOr<ScoreResult> result = (*client)->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  for (int64_t row = 0; row < c.args.rows; ++row) {
    ASSERT_EQ(result->logprob[static_cast<size_t>(row)], c.logprob(row)) << "row " << row;
  }
  EXPECT_GE(service().streams(), 1);
  EXPECT_GE(other.service().streams(), 1);
  EXPECT_EQ(result->retries, 1);
}

TEST_F(BulkStreamTest, ChunksMayNameRowsInSharedMemory) {
  server_.Share({});
  const ScoreCase c(9'456);

  const absl::StatusOr<ScoreResult> result =
      Connect({.transport = TransportChoice::kSharedMemory})->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->logprob.back(), c.logprob(9'455));
  EXPECT_EQ(result->transport, Transport::kSharedMemory);
  EXPECT_GE(service().streams(), 1);
  for (const v1::ScoreRequest& request : service().requests()) {
    EXPECT_TRUE(request.has_shared_memory());
  }
}

TEST(BulkStreamUnreachableTest, SaysWhereNobodyAnswered) {
  const auto client = Client::Create({.address = "127.0.0.1:1",
                                      .retries = 1,
                                      .backoff_initial = absl::Milliseconds(1),
                                      .backoff_max = absl::Milliseconds(1),
                                      .bulk_stream = true});
  const ScoreCase c(1);

  const absl::StatusOr<ScoreResult> result = (*client)->Score(c.args);

  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace logprobd::client
