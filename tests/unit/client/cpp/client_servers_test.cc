// Tests a client of several servers over gRPC.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/balancing_transport.h"
#include "client/cpp/client.h"
#include "client/cpp/grpc_transport.h"
#include "client/cpp/server_messages.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_scoring_service.h"
#include "tests/unit/client/cpp/score_case.h"

namespace logprobd::client {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using State = ServerState::State;

class ClientServersTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect(Client::Options options = {}) {
    if (options.address == Client::Options().address) {
      options.address = absl::StrCat(a_.address(), ",", b_.address());
    }
    options.backoff_initial = absl::Milliseconds(1);
    options.backoff_max = absl::Milliseconds(2);
    options.request_bytes = 4096;  // some 200 rows
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  /// Connects, and returns the client once the check of every server has succeeded.
  std::unique_ptr<Client> ConnectToAll(Client::Options options = {}) {
    std::unique_ptr<Client> client = Connect(std::move(options));
    // On a busy machine the checks may take longer than the first call waits.
    while (StatesOf(*client) != std::vector<State>{State::kReady, State::kReady}) {
      EXPECT_TRUE(client->ListHeads().ok());
    }
    return client;
  }

  static size_t Requests(const testing::FakeScoringServer& server) {
    return const_cast<testing::FakeScoringServer&>(server).service().requests().size();
  }

  static std::vector<State> StatesOf(const Client& client) {
    std::vector<State> states;
    for (const ServerState& state : client.Servers()) states.push_back(state.state);
    return states;
  }

  testing::FakeScoringServer a_;
  testing::FakeScoringServer b_;
};

void ExpectScoresOf(const ScoreCase& c, const absl::StatusOr<ScoreResult>& result) {
  ASSERT_TRUE(result.ok()) << result.status();
  for (int64_t row = 0; row < c.args.rows; ++row) {
    ASSERT_EQ(result->logprob[static_cast<size_t>(row)], c.logprob(row)) << "row " << row;
  }
}

TEST_F(ClientServersTest, UsesAllServersForALargeCall) {
  const ScoreCase c(5'000);

  const absl::StatusOr<ScoreResult> result = ConnectToAll()->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_EQ(Requests(a_) + Requests(b_), static_cast<size_t>(result->requests));
  EXPECT_GT(Requests(a_), 3U);
  EXPECT_GT(Requests(b_), 3U);
}

TEST_F(ClientServersTest, TakesTurnsWithSmallCalls) {
  const ScoreCase c(5);
  const std::unique_ptr<Client> client = ConnectToAll();

  for (int i = 0; i < 6; ++i) ExpectScoresOf(c, client->Score(c.args));

  EXPECT_EQ(Requests(a_), 3U);
  EXPECT_EQ(Requests(b_), 3U);
}

TEST_F(ClientServersTest, SendsTheTraceparentToEachServer) {
  ScoreCase c(5'000);
  c.args.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

  ExpectScoresOf(c, ConnectToAll()->Score(c.args));

  EXPECT_EQ(a_.service().traceparent(), c.args.traceparent);
  EXPECT_EQ(b_.service().traceparent(), c.args.traceparent);
}

TEST_F(ClientServersTest, GivesASlowServerLess) {
  ScoreCase c(8'000);
  b_.service().Hold();
  const std::unique_ptr<Client> client = ConnectToAll({.max_inflight = 2});
  // The held server is released once the other one has answered every request it could get.
  c.args.on_progress = [&](int64_t rows_done) {
    if (rows_done >= 7'000) b_.service().Release();
  };

  ExpectScoresOf(c, client->Score(c.args));

  EXPECT_EQ(b_.service().held_max(), 2);  // the window applies to each server
  EXPECT_GT(Requests(a_), 4 * Requests(b_));
}

TEST_F(ClientServersTest, LeavesADrainingServerAndFailsNothing) {
  const ScoreCase c(5'000);
  const std::unique_ptr<Client> client = ConnectToAll();
  ExpectScoresOf(c, client->Score(c.args));
  const size_t seen = Requests(a_);
  a_.SetServing(false);
  for (int i = 0; i < 100; ++i) {
    a_.service().FailNext({grpc::StatusCode::UNAVAILABLE, "draining"});
  }

  for (int i = 0; i < 3; ++i) ExpectScoresOf(c, client->Score(c.args));

  EXPECT_LE(Requests(a_) - seen, 8U);
  EXPECT_THAT(StatesOf(*client), ElementsAre(State::kOut, State::kReady));
  EXPECT_THAT(client->Servers()[0].reason, AnyOf(HasSubstr("draining"), HasSubstr("NOT_SERVING")));
}

TEST_F(ClientServersTest, SurvivesTheLossOfAServerDuringACall) {
  ScoreCase c(20'000);
  const std::unique_ptr<Client> client = ConnectToAll({.max_inflight = 4});
  b_.service().Hold();
  absl::Notification ended;
  absl::StatusOr<ScoreResult> result;

  client->ScoreAsync(c.args, [&](absl::StatusOr<ScoreResult> scored) {
    result = std::move(scored);
    ended.Notify();
  });
  b_.service().WaitForHeld(4);
  b_.Stop();
  ended.WaitForNotification();

  ExpectScoresOf(c, result);
  EXPECT_GE(result->retries, 1);
  EXPECT_EQ(client->Servers()[1].state, State::kOut);
}

TEST_F(ClientServersTest, SendsElsewhereWithoutWaiting) {
  const ScoreCase c(5);
  Client::Options options;
  options.address = absl::StrCat(a_.address(), ",", b_.address());
  options.backoff_initial = options.backoff_max = absl::Hours(1);
  const absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
  while (StatesOf(**client) != std::vector<State>{State::kReady, State::kReady}) {
    ASSERT_TRUE((*client)->ListHeads().ok());
  }
  a_.service().FailNext({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"}, "3600000");

  ExpectScoresOf(c, (*client)->Score(c.args));
  ExpectScoresOf(c, (*client)->Score(c.args));

  EXPECT_THAT(StatesOf(**client), ElementsAre(State::kBusy, State::kReady));
  EXPECT_EQ(Requests(a_), 1U);
}

TEST_F(ClientServersTest, NamesAllServersWhenAllAreGone) {
  b_.SetServing(false);
  const std::unique_ptr<Client> client =
      Connect({.address = absl::StrCat("127.0.0.1:1,", b_.address()), .attempts_max = 2});
  EXPECT_THAT(StatesOf(*client), ElementsAre(State::kUnknown, State::kUnknown));

  const absl::Status status = client->Score(ScoreCase(1).args).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("127.0.0.1:1 (UNAVAILABLE: "));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat(b_.address(), " (health says NOT_SERVING")));
  EXPECT_EQ(client->Ready().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ClientServersTest, DoesNotAskAgainWhetherServersAreReadyThatSaidNo) {
  a_.SetServing(false);
  b_.SetServing(false);
  constexpr absl::Duration kBackoff = absl::Seconds(20);
  const absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Create({.address = absl::StrCat(a_.address(), ",", b_.address()),
                      .timeout = absl::Seconds(60),
                      .backoff_initial = kBackoff,
                      .backoff_max = kBackoff});
  ASSERT_TRUE(client.ok()) << client.status();

  const absl::Time begin = absl::Now();
  EXPECT_EQ((*client)->Ready().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - begin, kBackoff / 2);
}

TEST_F(ClientServersTest, IsReadyWhenOneServerIs) {
  a_.SetServing(false);
  const std::unique_ptr<Client> client = Connect();

  EXPECT_TRUE(client->WaitReady(absl::Seconds(30)).ok());
  EXPECT_TRUE(*client->Ready());
  EXPECT_TRUE(client->Verify({}).ok());
}

TEST_F(ClientServersTest, RefusesDifferingHeadsUntilTheyAgree) {
  const ScoreCase c(5);
  b_.service().heads().mutable_heads(0)->set_vocab_size(99);
  const std::unique_ptr<Client> client = Connect();
  while (client->ListHeads().ok()) {
    // One server has not answered yet.
  }

  const absl::Status status = client->Score(c.args).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(a_.address()), HasSubstr(b_.address()),
                    HasSubstr("vocab_size of \"fake\" is 100 and 99")));
  EXPECT_EQ(Requests(a_) + Requests(b_), 0U);
  // Regression: the call retried until its deadline.
  EXPECT_EQ(client->WaitReady(absl::Hours(1)).code(), absl::StatusCode::kFailedPrecondition);
  b_.service().heads().mutable_heads(0)->set_vocab_size(100);
  ExpectScoresOf(c, client->Score(c.args));
}

TEST_F(ClientServersTest, KeepsTheTightestLimits) {
  b_.service().heads().mutable_heads(0)->mutable_limits()->set_request_rows_max(10);
  const std::unique_ptr<Client> client = ConnectToAll();

  EXPECT_EQ(client->ListHeads()->heads[0].limits.request_rows_max, 10);
  EXPECT_EQ(client->Score(ScoreCase(100).args)->requests, 10);
}

TEST_F(ClientServersTest, DoesNotMixVersionsInACall) {
  const ScoreCase c(5'000);
  b_.service().SetWeightsVersion(4);
  const std::unique_ptr<Client> client = Connect();

  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<ScoreResult> result = client->Score(c.args);
    ExpectScoresOf(c, result);
    EXPECT_THAT(result->weights_versions, AnyOf(ElementsAre(3U), ElementsAre(4U)));
  }
}

TEST_F(ClientServersTest, AsksAgainWhereTheFirstVersionIsHeld) {
  ScoreCase c(20'000);
  const std::unique_ptr<Client> client = ConnectToAll({.max_inflight = 2});
  c.args.on_progress = [this](int64_t rows_done) {
    if (rows_done > 4'000) b_.service().SetWeightsVersion(4);
  };

  const absl::StatusOr<ScoreResult> result = client->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_THAT(result->weights_versions, ElementsAre(3U));
  EXPECT_GT(Requests(a_) + Requests(b_), static_cast<size_t>(result->requests));
}

TEST_F(ClientServersTest, EndsInTheNewVersionWhenAllServersSwap) {
  ScoreCase c(20'000);
  const std::unique_ptr<Client> client = ConnectToAll({.max_inflight = 2});
  c.args.on_progress = [this](int64_t rows_done) {
    if (rows_done < 10'000) return;
    a_.service().SetWeightsVersion(4);
    b_.service().SetWeightsVersion(4);
  };

  const absl::StatusOr<ScoreResult> result = client->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_THAT(result->weights_versions, ElementsAre(4U));
  EXPECT_EQ(result->weights_version, 4U);
}

TEST_F(ClientServersTest, MixesVersionsWhereThatIsAllowed) {
  const ScoreCase c(5'000);
  b_.service().SetWeightsVersion(4);

  const absl::StatusOr<ScoreResult> result =
      ConnectToAll({.mix_weights_versions = true})->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_THAT(result->weights_versions, ElementsAre(3U, 4U));
  EXPECT_EQ(result->weights_version, 4U);
}

TEST_F(ClientServersTest, FindsAPinnedVersionWhereItIsHeld) {
  ScoreCase c(1'000);
  const std::unique_ptr<Client> client = ConnectToAll();
  b_.service().SetWeightsVersion(4);  // the version that the client knows is outdated
  for (const uint64_t version : {4U, 3U, 4U}) {
    c.args.weights_version = version;
    const absl::StatusOr<ScoreResult> result = client->Score(c.args);
    ExpectScoresOf(c, result);
    EXPECT_THAT(result->weights_versions, ElementsAre(version));
  }
  c.args.weights_version = 9;

  const absl::Status status = client->Score(c.args).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("version 9"), HasSubstr(a_.address()), HasSubstr(b_.address())));
}

TEST_F(ClientServersTest, ScoresAgainWhatASingleServersSwapLeftBehind) {
  ScoreCase c(5'000);
  const std::unique_ptr<Client> client = Connect({.address = a_.address(), .max_inflight = 1});
  c.args.on_progress = [this](int64_t rows_done) {
    if (rows_done > 2'000) a_.service().SetWeightsVersion(4);
  };

  const absl::StatusOr<ScoreResult> result = client->Score(c.args);

  ExpectScoresOf(c, result);
  EXPECT_THAT(result->weights_versions, ElementsAre(4U));
}

TEST_F(ClientServersTest, CountsNoWorkAfterACallHasEnded) {
  const ScoreCase c(5'000);
  const std::unique_ptr<Client> client = ConnectToAll();
  ASSERT_TRUE(client->ListHeads().ok());
  a_.service().FailNext({grpc::StatusCode::INVALID_ARGUMENT, "targets[5] is 101"});

  EXPECT_EQ(client->Score(c.args).status().code(), absl::StatusCode::kInvalidArgument);

  for (const ServerState& state : client->Servers()) {
    EXPECT_EQ(state.requests, 0);
    EXPECT_EQ(state.bytes, 0);
  }
}

TEST_F(ClientServersTest, CancelsWhatIsInFlightWhenItIsDestroyed) {
  a_.service().Hold();
  b_.service().Hold();
  std::unique_ptr<Client> client = ConnectToAll();
  const ScoreCase c(5'000);
  absl::Status status;
  client->ScoreAsync(c.args,
                     [&](const absl::StatusOr<ScoreResult>& result) { status = result.status(); });
  a_.service().WaitForHeld(1);
  b_.service().WaitForHeld(1);

  client.reset();

  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

TEST_F(ClientServersTest, UsesAServerThatComesBackWhileTheOtherOneIsStuck) {
  const ScoreCase c(5'000);
  b_.SetServing(false);
  const std::unique_ptr<Client> client = Connect({.max_inflight = 2});
  while (StatesOf(*client) != std::vector<State>{State::kReady, State::kOut}) {
    EXPECT_TRUE(client->ListHeads().ok());
  }
  a_.service().Hold();
  absl::Notification ended;
  absl::StatusOr<ScoreResult> result;

  client->ScoreAsync(c.args, [&](absl::StatusOr<ScoreResult> scored) {
    result = std::move(scored);
    ended.Notify();
  });
  a_.service().WaitForHeld(2);
  b_.SetServing(true);
  b_.service().Hold();
  b_.service().WaitForHeld(2);
  b_.service().Release();
  a_.service().Release();
  ended.WaitForNotification();

  ExpectScoresOf(c, result);
}

/// Tests a name with two records, 127.0.0.1 and 127.0.0.2, on one port.
class NameTest : public ::testing::Test {
 protected:
  RpcReply AskHealth(RpcTransport& transport) {
    RpcReply reply;
    absl::Notification ended;
    transport.Call({.method = kHealthMethod,
                    .body = EncodeHealthRequest(""),
                    .deadline = transport.Now() + absl::Seconds(30),
                    .scope = transport.NewScope()},
                   [&](RpcReply health) {
                     reply = std::move(health);
                     ended.Notify();
                   });
    ended.WaitForNotification();
    return reply;
  }

  std::unique_ptr<BalancingTransport> Make(Resolver resolve) {
    return std::make_unique<BalancingTransport>(BalancingTransport::Options{
        .addresses = {"dns:///scorer:1"},
        .connections = std::make_unique<GrpcTransport>(GrpcTransport::Options{.channels = 1}),
        .resolve = std::move(resolve),
        .unit_random = [] { return 0.5; }});
  }
};

TEST_F(NameTest, StandsForAServerAtEachRecord) {
  testing::FakeScoringServer one;
  testing::FakeScoringServer two("127.0.0.2", one.port());
  std::vector<std::string> asked;
  const auto transport = Make([&](const DnsName& name) {
    asked = {name.host, name.port};
    return std::vector<std::string>{one.address(), two.address()};
  });

  RpcReply reply = AskHealth(*transport);
  while (transport->balance().ready().size() < 2) reply = AskHealth(*transport);

  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_THAT(asked, ElementsAre("scorer", "1"));
  EXPECT_THAT(transport->balance().ready(), ElementsAre(one.address(), two.address()));
}

TEST_F(NameTest, SaysThatItIsUnknown) {
  const auto transport =
      Make([](const DnsName&) { return absl::UnavailableError("Name or service not known"); });

  const RpcReply reply = AskHealth(*transport);

  EXPECT_EQ(reply.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(reply.status.message()),
              HasSubstr("dns:///scorer:1: Name or service not known"));
}

}  // namespace
}  // namespace logprobd::client
