// Tests the client with a server that shares memory with it.

#include <cstdlib>
#include <cstring>
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

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

/// A chunk of 1,000 rows has 16 KB, so in auto mode its rows would be sent inside the request.
constexpr TransportChoice kShm = TransportChoice::kSharedMemory;

class ClientSameHostTest : public ::testing::Test {
 protected:
  explicit ClientSameHostTest(testing::FakeControlSocket::Options options = {})
      : control_(server_.Share(std::move(options))) {}

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
  testing::FakeControlSocket& control_;
};

void ExpectScoresOf(const ScoreCase& c, const absl::StatusOr<ScoreResult>& result) {
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_THAT(result->logprob, SizeIs(static_cast<size_t>(c.args.rows)));
  for (int64_t row = 0; row < c.args.rows; ++row) {
    ASSERT_EQ(result->logprob[static_cast<size_t>(row)], c.logprob(row)) << "row " << row;
  }
}

TEST_F(ClientSameHostTest, ScoresThroughSharedMemory) {
  service().heads().mutable_heads(0)->mutable_limits()->set_request_rows_max(100'000);
  const ScoreCase c(20'000);
  const std::unique_ptr<Client> client = Connect();

  const absl::StatusOr<ScoreResult> result = client->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_EQ(result->transport, Transport::kSharedMemory);
  EXPECT_EQ(client->transport(), Transport::kSharedMemory);
  EXPECT_EQ(client->transport_reason(), "");
  ASSERT_EQ(service().requests().size(), 1U);
  EXPECT_TRUE(service().requests()[0].has_shared_memory());
  EXPECT_EQ(service().requests()[0].hidden(), "");
}

TEST_F(ClientSameHostTest, SaysWhySmallRequestsTravelInTheirMessage) {
  const ScoreCase c(10);
  const std::unique_ptr<Client> client = Connect();

  ExpectScoresOf(c, client->Score(c.args));

  EXPECT_EQ(client->transport(), Transport::kTcp);
  EXPECT_THAT(client->transport_reason(),
              HasSubstr("sending the rows inside the request is faster"));
}

TEST_F(ClientSameHostTest, RowsToSeveralServersTravelInRequests) {
  testing::FakeScoringServer other;
  other.Share({});
  const ScoreCase c(20'000);
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(
      {.address = absl::StrCat(server_.address(), ",", other.address()), .request_bytes = 100'000});
  ASSERT_TRUE(client.ok()) << client.status();

  const absl::StatusOr<ScoreResult> result = (*client)->Score(c.args);
  const absl::StatusOr<RowBuffer> buffer = (*client)->AllocateRows(100'000);

  ExpectScoresOf(c, result);
  EXPECT_EQ(result->transport, Transport::kTcp);
  EXPECT_EQ((*client)->transport(), Transport::kTcp);
  EXPECT_EQ((*client)->transport_reason(), "with several servers, rows are sent inside requests");
  EXPECT_THAT(control_.clients(), SizeIs(0));
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_FALSE(buffer->is_shared());
}

TEST_F(ClientSameHostTest, RefusesToForceATransportToSeveralServers) {
  for (const TransportChoice choice : {kShm, TransportChoice::kCudaIpc}) {
    const auto client = Client::Create({.address = "a:1,b:1", .transport = choice});

    EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(client.status().message(), HasSubstr("names several servers"));
    EXPECT_THAT(client.status().message(), HasSubstr("transport is "));
  }
  EXPECT_TRUE(Client::Create({.address = "a:1,b:1", .transport = TransportChoice::kTcp}).ok());
  EXPECT_FALSE(Client::Create({.address = "dns:///a:1", .transport = kShm}).ok());
}

TEST_F(ClientSameHostTest, UsesAsManySlotsAsRequestsAreInFlight) {
  const ScoreCase c(50'000);
  const std::unique_ptr<Client> client =
      Connect({.max_inflight = 3, .request_bytes = 16'384, .transport = kShm});

  for (int repeat = 0; repeat < 5; ++repeat) ExpectScoresOf(c, client->Score(c.args));

  EXPECT_EQ(control_.num_regions(), 1);
  EXPECT_EQ(control_.region_bytes(), 3 * 16'384);
  for (const v1::ScoreRequest& request : service().requests()) {
    EXPECT_TRUE(request.has_shared_memory());
  }
}

TEST_F(ClientSameHostTest, ServesManyThreadsWithOneLease) {
  const std::unique_ptr<Client> client = Connect({.transport = kShm});
  std::vector<std::thread> threads;
  for (int64_t i = 1; i <= 8; ++i) {
    threads.emplace_back([&client, i] {
      const ScoreCase c(i * 333);
      for (int repeat = 0; repeat < 10; ++repeat) ExpectScoresOf(c, client->Score(c.args));
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_THAT(control_.clients(), SizeIs(1));
}

TEST_F(ClientSameHostTest, ScoresABufferWithoutACopy) {
  ScoreCase c(8'000);
  const std::unique_ptr<Client> client = Connect();
  absl::StatusOr<RowBuffer> buffer = client->AllocateRows(static_cast<int64_t>(c.hidden.size()));
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  ASSERT_TRUE(buffer->is_shared());
  std::memcpy(buffer->bytes().data(), c.hidden.data(), c.hidden.size());
  c.args.hidden = buffer->bytes();

  const absl::StatusOr<ScoreResult> result = client->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_EQ(result->transport, Transport::kSharedMemory);  // even for chunks of 16,000 bytes
  EXPECT_EQ(control_.num_regions(), 1);
}

TEST_F(ClientSameHostTest, RetriesFromTheSameSlot) {
  const ScoreCase c(10);
  service().FailNext({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"}, "1");
  service().FailNext({grpc::StatusCode::UNAVAILABLE, "restarting"});

  const absl::StatusOr<ScoreResult> result = Connect({.transport = kShm})->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_EQ(result->retries, 2);
  EXPECT_EQ(result->transport, Transport::kSharedMemory);
}

TEST_F(ClientSameHostTest, ConnectsAgainWhenTheServerHasLostItsRegions) {
  const ScoreCase c(5'000);
  const std::unique_ptr<Client> client = Connect({.transport = kShm});
  ExpectScoresOf(c, client->Score(c.args));
  control_.LoseRegions();

  const absl::StatusOr<ScoreResult> result = client->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_EQ(result->transport, Transport::kSharedMemory);
}

TEST_F(ClientSameHostTest, FallsBackToMessagesWhenEverySliceIsRefused) {
  service().heads().mutable_heads(0)->mutable_limits()->set_request_rows_max(5'000);
  const ScoreCase c(20'000);
  control_.RefuseSlices({grpc::StatusCode::FAILED_PRECONDITION, "shared_memory: switched off"});
  const std::unique_ptr<Client> client = Connect();

  const absl::StatusOr<ScoreResult> result = client->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_EQ(result->transport, Transport::kTcp);
  EXPECT_THAT(client->transport_reason(), HasSubstr("switched off"));
}

TEST_F(ClientSameHostTest, LeavesErrorsOfTheRequestAsTheyAre) {
  const ScoreCase c(10);
  service().FailNext({grpc::StatusCode::INVALID_ARGUMENT, "targets[5] is 101"});

  const absl::StatusOr<ScoreResult> result = Connect({.transport = kShm})->Score(c.args);

  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(service().requests().size(), 1U);
}

TEST_F(ClientSameHostTest, EndsACallOnceWhenTheChosenTransportIsNotAvailable) {
  service().heads().clear_local();
  const ScoreCase c(5'000);

  const absl::StatusOr<ScoreResult> result = Connect({.transport = kShm})->Score(c.args);

  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("the server has no control socket"));
  EXPECT_EQ(service().requests().size(), 0U);
}

TEST_F(ClientSameHostTest, SaysThatTheServerRefusesTheChosenTransport) {
  const ScoreCase c(5'000);
  control_.RefuseSlices({grpc::StatusCode::FAILED_PRECONDITION, "shared_memory: switched off"});

  const absl::StatusOr<ScoreResult> result = Connect({.transport = kShm})->Score(c.args);

  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(result.status().message(),
              AllOf(HasSubstr("transport is shm"), HasSubstr("switched off")));
}

TEST_F(ClientSameHostTest, CancelsWhatIsInFlightWhenItIsDestroyed) {
  const ScoreCase c(5'000);
  service().Hold();
  std::unique_ptr<Client> client = Connect({.transport = kShm});
  absl::Status status;
  client->ScoreAsync(c.args, [&](absl::StatusOr<ScoreResult> result) { status = result.status(); });
  service().WaitForHeld(1);

  client.reset();

  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  control_.WaitForNoLease();
}

TEST_F(ClientSameHostTest, TakesItsTransportFromTheEnvironmentUnlessItIsGiven) {
  const ScoreCase c(10);
  setenv("LOGPROBD_TRANSPORT", "shm", 1);
  const std::unique_ptr<Client> chosen = Connect();
  const std::unique_ptr<Client> given = Connect({.transport = TransportChoice::kTcp});
  setenv("LOGPROBD_TRANSPORT", "fast", 1);
  const absl::Status wrong = Client::Create({}).status();
  unsetenv("LOGPROBD_TRANSPORT");

  ExpectScoresOf(c, chosen->Score(c.args));
  ExpectScoresOf(c, given->Score(c.args));

  EXPECT_EQ(chosen->transport(), Transport::kSharedMemory);
  EXPECT_EQ(given->transport(), Transport::kTcp);
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("LOGPROBD_TRANSPORT: transport is \"fast\""));
}

TEST_F(ClientSameHostTest, ListsTheServersControlSocket) {
  const absl::StatusOr<ServerInfo> info = Connect()->ListHeads();

  ASSERT_TRUE(info.ok());
  ASSERT_TRUE(info->local.has_value());
  EXPECT_EQ(info->local->control_path, control_.access().control_path());
  EXPECT_TRUE(info->local->shared_memory);
  EXPECT_FALSE(info->local->cuda_ipc);
}

class ClientDeviceRowsTest : public ClientSameHostTest {
 protected:
  ClientDeviceRowsTest() : ClientSameHostTest({.device_memory = Memory()}) {
    case_.args.device_rows = DeviceRows{.offset = 32, .bytes = 3'000 * 16};
  }

  /// Returns the rows of the case, after 32 other bytes.
  static std::string Memory() {
    const ScoreCase c(3'000);
    std::string memory(32 + c.hidden.size(), '\0');
    std::memcpy(memory.data() + 32, c.hidden.data(), c.hidden.size());
    return memory;
  }

  ScoreCase case_{3'000};
};

TEST_F(ClientDeviceRowsTest, ScoresRowsOfADeviceWithoutRowsOfTheHost) {
  case_.args.hidden = {};
  const std::unique_ptr<Client> client = Connect();

  const absl::StatusOr<ScoreResult> result = client->Score(case_.args);

  ExpectScoresOf(case_, result);
  EXPECT_EQ(result->transport, Transport::kCudaIpc);
  EXPECT_EQ(service().requests().size(), 3U);
  for (const v1::ScoreRequest& request : service().requests()) EXPECT_TRUE(request.has_cuda_ipc());
}

TEST_F(ClientDeviceRowsTest, FallsBackToRowsOfTheHost) {
  control_.RefuseSlices({grpc::StatusCode::RESOURCE_EXHAUSTED, "cuda_ipc: too many mappings"});
  const std::unique_ptr<Client> client = Connect();

  const absl::StatusOr<ScoreResult> result = client->Score(case_.args);

  ExpectScoresOf(case_, result);
  EXPECT_EQ(result->transport, Transport::kTcp);  // chunks of 16,000 bytes
  EXPECT_THAT(client->transport_reason(), HasSubstr("too many mappings"));
}

}  // namespace
}  // namespace logprobd::client
