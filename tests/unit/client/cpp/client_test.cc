#include "client/cpp/client.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_scoring_service.h"
#include "tests/support/loopback_listener.h"
#include "tests/unit/client/cpp/score_case.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class ClientTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect(Client::Options options = {}) {
    options.address = server_.address();
    options.backoff_initial = absl::Milliseconds(1);
    options.backoff_max = absl::Milliseconds(2);
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  testing::FakeScoringService& service() { return server_.service(); }

  testing::FakeScoringServer server_;
};

void ExpectScoresOf(const ScoreCase& c, const ScoreResult& result) {
  ASSERT_THAT(result.logprob, SizeIs(static_cast<size_t>(c.args.rows)));
  for (int64_t row = 0; row < c.args.rows; ++row) {
    ASSERT_EQ(result.logprob[static_cast<size_t>(row)], c.logprob(row)) << "row " << row;
  }
}

TEST_F(ClientTest, ScoresOneRequest) {
  const ScoreCase c(10);

  const absl::StatusOr<ScoreResult> result = Connect()->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  ExpectScoresOf(c, *result);
  EXPECT_THAT(result->entropy, SizeIs(10));
  EXPECT_THAT(result->lse, IsEmpty());
  EXPECT_EQ(result->weights_version, 3U);
  EXPECT_EQ(result->requests, 1);
}

TEST_F(ClientTest, CutsALargeCallAndKeepsItsOrder) {
  ScoreCase c(3'456);
  c.args.outputs = 511;
  c.args.top_k = 2;

  const absl::StatusOr<ScoreResult> result = Connect()->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  ExpectScoresOf(c, *result);
  EXPECT_EQ(result->requests, 4);  // the fake accepts 1,000 rows per request
  EXPECT_EQ(result->argmax_id, c.targets);
  EXPECT_THAT(result->max_logit, AllOf(SizeIs(3'456), Each(1.0F)));
  ASSERT_THAT(result->target_rank, SizeIs(3'456));
  EXPECT_EQ(result->target_rank[3'001], c.targets[3'001] / 2);
  ASSERT_THAT(result->top_k_ids, SizeIs(2 * 3'456));
  EXPECT_EQ(result->top_k_ids[2 * 3'001 + 1], c.targets[3'001] + 1);
}

TEST_F(ClientTest, GivesTheSameSegmentsWholeOrCut) {
  ScoreCase c(900);
  c.segment_offsets = {0, 10, 10, 555, 900};
  c.args.segment_offsets = c.segment_offsets;
  c.targets[4] = -100;
  const std::unique_ptr<Client> whole = Connect();
  const std::unique_ptr<Client> cut = Connect({.request_bytes = 4096});

  const absl::StatusOr<ScoreResult> expected = whole->Score(c.args);
  const absl::StatusOr<ScoreResult> result = cut->Score(c.args);

  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->requests, 1);
  EXPECT_EQ(result->segment_logprob, expected->segment_logprob);
  EXPECT_THAT(result->segment_rows, ElementsAre(9U, 0U, 545U, 345U));
  EXPECT_EQ(result->segment_rows, expected->segment_rows);
  EXPECT_EQ(result->segment_greedy, expected->segment_greedy);
}

TEST_F(ClientTest, ReturnsRaggedCandidatesInTheOrderGiven) {
  ScoreCase c(2'500);
  c.candidate_offsets.push_back(0);
  for (int32_t row = 0; row < 2'500; ++row) {
    for (int32_t k = 0; k < row % 3; ++k) c.candidate_ids.push_back(row % 100 + k);
    c.candidate_offsets.push_back(static_cast<int64_t>(c.candidate_ids.size()));
  }
  c.args.candidate_ids = c.candidate_ids;
  c.args.candidate_offsets = c.candidate_offsets;

  const absl::StatusOr<ScoreResult> result = Connect()->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  std::vector<float> expected;
  for (const int32_t id : c.candidate_ids) expected.push_back(-static_cast<float>(id));
  EXPECT_EQ(result->candidate_logprobs, expected);
}

TEST_F(ClientTest, ScoresNoRows) {
  const ScoreCase c(0);

  const absl::StatusOr<ScoreResult> result = Connect()->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows, 0);
  EXPECT_THAT(result->logprob, IsEmpty());
}

TEST_F(ClientTest, RetriesWhatTheServerWasTooBusyFor) {
  const ScoreCase c(10);
  service().FailNext({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"}, "1");
  service().FailNext({grpc::StatusCode::UNAVAILABLE, "restarting"});

  const absl::StatusOr<ScoreResult> result = Connect()->Score(c.args);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->retries, 2);
  EXPECT_EQ(service().requests().size(), 3U);
}

TEST_F(ClientTest, HonoursTheServersRefusalOfRetries) {
  const ScoreCase c(10);
  service().FailNext({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"}, "-1");

  const absl::StatusOr<ScoreResult> result = Connect()->Score(c.args);

  EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(service().requests().size(), 1U);
}

TEST_F(ClientTest, ReportsTheServersErrorOnce) {
  const ScoreCase c(2'500);
  service().FailNext({grpc::StatusCode::INVALID_ARGUMENT, "targets[5] is 101"});

  const absl::StatusOr<ScoreResult> result = Connect({.max_inflight = 1})->Score(c.args);

  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("targets[5] is 101"));
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("rows 0 to 833"));
  EXPECT_EQ(service().requests().size(), 1U);
}

TEST_F(ClientTest, StopsAtItsDeadline) {
  ScoreCase c(10);
  service().Hold();
  const std::unique_ptr<Client> client = Connect();
  ASSERT_TRUE(client->ListHeads().ok());
  c.args.timeout = absl::Milliseconds(50);

  const absl::StatusOr<ScoreResult> result = client->Score(c.args);

  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("timeout of 50ms"));
}

/// Returns the threads on which progress was reported.
std::vector<std::thread::id> ThreadsOf(Client& client, ScoreCase c) {
  std::vector<std::thread::id> threads;
  c.args.on_progress = [&](int64_t) { threads.push_back(std::this_thread::get_id()); };
  const absl::StatusOr<ScoreResult> result = client.Score(c.args);
  EXPECT_TRUE(result.ok()) << result.status();
  return threads;
}

TEST_F(ClientTest, ReceivesTheAnswerOnTheCallersThread) {
  const std::unique_ptr<Client> client = Connect();
  const std::unique_ptr<Client> looking = Connect({.busy_poll = absl::Hours(1)});

  EXPECT_THAT(ThreadsOf(*client, ScoreCase(10)), ElementsAre(std::this_thread::get_id()));
  EXPECT_THAT(ThreadsOf(*client, ScoreCase(10)), ElementsAre(std::this_thread::get_id()));
  EXPECT_THAT(ThreadsOf(*looking, ScoreCase(10)), ElementsAre(std::this_thread::get_id()));
}

TEST_F(ClientTest, ReceivesARetriedAnswerOnTheCallersThreadToo) {
  const std::unique_ptr<Client> client = Connect();
  service().FailNext({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"}, "1");

  EXPECT_THAT(ThreadsOf(*client, ScoreCase(10)), ElementsAre(std::this_thread::get_id()));
  EXPECT_EQ(service().requests().size(), 2U);
}

TEST_F(ClientTest, LeavesSeveralRequestsToThreadsOfTheLibrary) {
  const std::unique_ptr<Client> client = Connect();

  EXPECT_THAT(ThreadsOf(*client, ScoreCase(3'000)),
              AllOf(SizeIs(3), Not(Contains(std::this_thread::get_id()))));
}

TEST_F(ClientTest, ScoresWithinTheProgressAndTheCallbackOfAnotherCall) {
  ScoreCase c(10);
  const ScoreCase other(20);
  const std::unique_ptr<Client> client = Connect();
  c.args.on_progress = [&](int64_t) { EXPECT_TRUE(client->Score(other.args).ok()); };
  absl::Notification ended;

  EXPECT_TRUE(client->Score(c.args).ok());
  client->ScoreAsync(other.args, [&](const absl::StatusOr<ScoreResult>& first) {
    EXPECT_TRUE(first.ok()) << first.status();
    EXPECT_TRUE(client->Score(other.args).ok());
    ended.Notify();
  });
  ended.WaitForNotification();
}

TEST_F(ClientTest, IsNotHeldUpByACallThatItsProgressStarts) {
  ScoreCase c(10);
  const ScoreCase other(20);
  const std::unique_ptr<Client> client = Connect();
  absl::Notification ended;
  c.args.on_progress = [&](int64_t) {
    service().Hold();
    client->ScoreAsync(other.args, [&](const absl::StatusOr<ScoreResult>& result) {
      EXPECT_TRUE(result.ok()) << result.status();
      ended.Notify();
    });
  };

  EXPECT_TRUE(client->Score(c.args).ok());

  EXPECT_FALSE(ended.HasBeenNotified());
  service().Release();
  ended.WaitForNotification();
}

TEST_F(ClientTest, ReturnsWhenAnotherThreadDestroysTheClient) {
  const ScoreCase c(10);
  service().Hold();
  std::unique_ptr<Client> client = Connect();
  absl::Status status;
  std::thread caller([&, raw = client.get()] { status = raw->Score(c.args).status(); });
  service().WaitForHeld(1);

  client.reset();
  caller.join();

  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

TEST_F(ClientTest, FindsTheAnswerWhetherItPollsOrSleeps) {
  const ScoreCase c(10);
  for (const absl::Duration busy_poll : {absl::Hours(1), absl::Nanoseconds(1)}) {
    const std::unique_ptr<Client> client = Connect({.busy_poll = busy_poll});
    ASSERT_TRUE(client->Score(c.args).ok());
    service().Hold();
    std::thread caller([&] { EXPECT_TRUE(client->Score(c.args).ok()); });
    service().WaitForHeld(1);

    service().Release();
    caller.join();
  }
}

TEST_F(ClientTest, KeepsItsWindow) {
  const ScoreCase c(5'000);
  service().Hold();
  const std::unique_ptr<Client> client = Connect({.max_inflight = 2});
  absl::Notification ended;

  client->ScoreAsync(c.args, [&](absl::StatusOr<ScoreResult> result) {
    EXPECT_TRUE(result.ok()) << result.status();
    ended.Notify();
  });
  service().WaitForHeld(2);
  service().Release();
  ended.WaitForNotification();

  EXPECT_EQ(service().held_max(), 2);
}

TEST_F(ClientTest, CancelsWhatIsInFlightWhenItIsDestroyed) {
  const ScoreCase c(5'000);
  service().Hold();
  std::unique_ptr<Client> client = Connect();
  absl::Status status;
  client->ScoreAsync(c.args, [&](absl::StatusOr<ScoreResult> result) { status = result.status(); });
  service().WaitForHeld(1);

  client.reset();

  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

TEST_F(ClientTest, ServesManyThreads) {
  const std::unique_ptr<Client> client = Connect();
  std::vector<std::thread> threads;

  for (int64_t i = 1; i <= 8; ++i) {
    threads.emplace_back([&client, i] {
      const ScoreCase c(i * 333);
      for (int repeat = 0; repeat < 10; ++repeat) {
        const absl::StatusOr<ScoreResult> result = client->Score(c.args);
        ASSERT_TRUE(result.ok()) << result.status();
        ExpectScoresOf(c, *result);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ClientTest, SendsItsNameForFairness) {
  const ScoreCase c(1);

  ASSERT_TRUE(Connect({.client_id = "trainer-1"})->Score(c.args).ok());

  EXPECT_EQ(service().client_id(), "trainer-1");
}

TEST_F(ClientTest, SendsTheTraceparentInTheMetadata) {
  ScoreCase c(10);
  c.args.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  const std::unique_ptr<Client> client = Connect();

  ASSERT_TRUE(client->Score(c.args).ok());
  EXPECT_EQ(service().traceparent(), c.args.traceparent);
  EXPECT_EQ(service().requests()[0].traceparent(), "");

  c.args.traceparent = "";
  ASSERT_TRUE(client->Score(c.args).ok());
  EXPECT_EQ(service().traceparent(), "");
}

TEST_F(ClientTest, ReturnsTheTraceOfEachRequestInTheOrderOfRows) {
  ScoreCase c(2'500);
  const std::unique_ptr<Client> client = Connect();

  const absl::StatusOr<ScoreResult> without = client->Score(c.args);
  c.args.trace = true;
  const absl::StatusOr<ScoreResult> with = client->Score(c.args);

  ASSERT_TRUE(without.ok()) << without.status();
  ASSERT_TRUE(with.ok()) << with.status();
  EXPECT_THAT(without->traces, IsEmpty());
  absl::Duration rows;
  for (const RequestTrace& trace : with->traces) rows += trace.reply.end;  // see the fake
  EXPECT_EQ(rows, absl::Nanoseconds(2'500));
  EXPECT_THAT(with->traces, SizeIs(static_cast<size_t>(with->requests)));
}

TEST_F(ClientTest, ListsHeads) {
  const absl::StatusOr<ServerInfo> info = Connect()->ListHeads();

  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->server_version, "9.8.7");
  ASSERT_THAT(info->heads, SizeIs(1));
  EXPECT_EQ(info->heads[0].name, "fake");
  EXPECT_EQ(info->heads[0].vocab_size, 100);
  EXPECT_EQ(info->heads[0].limits.request_rows_max, 1'000);
  EXPECT_THAT(info->heads[0].transports, ElementsAre("tcp"));
  ASSERT_THAT(info->heads[0].layout, SizeIs(2));
  EXPECT_EQ(info->heads[0].layout[1].shard, 1);
  EXPECT_EQ(info->heads[0].layout[1].device, "gpu1");
  EXPECT_EQ(info->heads[0].layout[1].vocab_begin, 96);
  EXPECT_EQ(info->heads[0].layout[1].vocab_end, 100);
}

TEST_F(ClientTest, ReportsVerify) {
  const absl::StatusOr<VerifyReport> report = Connect()->Verify({.rows = 8});

  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->passed);
  EXPECT_EQ(report->logprob_difference_max, 1.5e-5);
  EXPECT_EQ(report->logit_stddev, 3.0);
}

TEST_F(ClientTest, WaitsUntilTheServerServes) {
  const std::unique_ptr<Client> client = Connect();
  server_.SetServing(false);
  std::thread loader([this] { server_.SetServing(true); });

  EXPECT_TRUE(client->WaitReady(absl::Seconds(30)).ok());

  loader.join();
  EXPECT_TRUE(*client->Ready());
}

// Regression: the last check, which had microseconds left, replaced what the server had said.
TEST_F(ClientTest, SaysWhatItWaitedForWhenTheTimeIsUp) {
  server_.SetServing(false);

  const std::unique_ptr<Client> client = Connect();
  EXPECT_FALSE(*client->Ready());  // it is connected now, so that its probes take little time

  const absl::Status status = client->WaitReady(absl::Milliseconds(300));

  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("not serving yet"));
}

TEST(UnansweredTest, WaitReadySaysHowItsOnlyCheckEnded) {
  const testing::LoopbackListener listener;
  const auto client = Client::Create({.address = listener.address()});
  ASSERT_TRUE(client.ok());

  const absl::Status status = (*client)->WaitReady(absl::Milliseconds(50));

  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("was not ready within 50ms: "));
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("it was not asked")));
}

TEST(ClientOptionsTest, NamesTheBadOption) {
  const auto message = [](const Client::Options& options) {
    return std::string(Client::Create(options).status().message());
  };

  EXPECT_THAT(message({.address = ""}), HasSubstr("address is empty"));
  EXPECT_THAT(message({.address = "a:1,::1:2"}), HasSubstr("address is \"::1:2\""));
  EXPECT_THAT(message({.channels = 0}), HasSubstr("channels is 0, must be 1 to 64"));
  EXPECT_THAT(message({.timeout = absl::ZeroDuration()}), HasSubstr("timeout is 0"));
  EXPECT_THAT(message({.attempts_max = 0}), HasSubstr("attempts_max is 0"));
  EXPECT_THAT(message({.busy_poll = -absl::Milliseconds(2)}), HasSubstr("busy_poll is -2ms"));
  EXPECT_THAT(message({.max_inflight = 0}), HasSubstr("max_inflight is 0"));
  EXPECT_THAT(message({.request_bytes = 10}), HasSubstr("request_bytes is 10"));
}

TEST(UnreachableTest, SaysWhereNobodyAnswered) {
  // No server listens on port 1 of the loopback address.
  const auto client = Client::Create({.address = "127.0.0.1:1",
                                      .attempts_max = 2,
                                      .backoff_initial = absl::Milliseconds(1),
                                      .backoff_max = absl::Milliseconds(1)});
  ASSERT_TRUE(client.ok());
  const ScoreCase c(1);

  const absl::StatusOr<ScoreResult> result = (*client)->Score(c.args);

  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("check that logprobd runs and is ready at 127.0.0.1:1"));
}

TEST(UnreachableTest, AsksWhetherAServerThatSpeaksHttp1IsTheHttpPort) {
  const testing::LoopbackListener listener;
  std::thread server([&listener] {
    constexpr char kReply[] = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
    while (true) {
      const int connection = listener.Accept();
      if (connection < 0) return;
      char request[1024];
      static_cast<void>(recv(connection, request, sizeof(request), 0));
      static_cast<void>(send(connection, kReply, sizeof(kReply) - 1, MSG_NOSIGNAL));
      close(connection);
    }
  });
  const ScoreCase c(1);

  auto client = Client::Create({.address = listener.address(),
                                .channels = 1,
                                .attempts_max = 2,
                                .backoff_initial = absl::Milliseconds(1)});
  const absl::Status status = (*client)->Score(c.args).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is this the --http port?"));
  client->reset();  // closes its connections, so that recv returns
  listener.ShutDown();
  server.join();
}

// Regression: an attempt to connect was given up after 100 ms, which is too short for a slow
// network.
TEST(UnreachableTest, GivesAConnectionTime) {
  const testing::LoopbackListener listener;  // sends nothing
  const auto client = Client::Create({.address = listener.address(), .attempts_max = 1});
  ScoreCase c(1);
  c.args.timeout = absl::Milliseconds(500);

  EXPECT_EQ((*client)->Score(c.args).status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(ClientArgsTest, ChecksArgumentsBeforeSending) {
  const auto client = Client::Create({.address = "127.0.0.1:1"});
  ASSERT_TRUE(client.ok());
  ScoreCase c(2);
  c.args.rows = 3;

  EXPECT_EQ((*client)->Score(c.args).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace logprobd::client
