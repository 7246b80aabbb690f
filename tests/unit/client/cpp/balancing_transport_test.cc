#include "client/cpp/balancing_transport.h"

#include <grpcpp/support/slice.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/call_versions.h"
#include "client/cpp/policy.h"
#include "client/cpp/server_check.h"
#include "client/cpp/server_messages.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "logprobd/v1/scoring.pb.h"
#include "tests/unit/client/cpp/fake_transport.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using State = ServerState::State;

grpc::ByteBuffer Bytes(const std::string& text) {
  const grpc::Slice slice(text);
  return {&slice, 1};
}

/// Passes the requests to each server to a FakeTransport of its own, and is the clock.
class FakeServers final : public RpcTransport {
 public:
  std::shared_ptr<CancelScope> NewScope() override { return timers.NewScope(); }
  void Call(RpcRequest&& request, RpcDone done) override {
    FakeTransport& server = servers[request.server];
    server.Call(std::move(request), std::move(done));
  }
  void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
             absl::AnyInvocable<void() &&> callback) override {
    timers.After(delay, scope, std::move(callback));
  }
  absl::Time Now() const override { return timers.Now(); }

  FakeTransport timers;
  std::map<std::string, FakeTransport> servers;
};

/// A BalancingTransport over FakeServers: a test answers every request, including checks.
class BalancingTransportTest : public ::testing::Test {
 protected:
  void Make(std::vector<std::string> addresses, int32_t channels = 1) {
    auto fakes = std::make_unique<FakeServers>();
    fakes_ = fakes.get();
    balancing_ = std::make_unique<BalancingTransport>(
        BalancingTransport::Options{.addresses = std::move(addresses),
                                    .channels = channels,
                                    .connections = std::move(fakes),
                                    .unit_random = [] { return 1.0; }});
  }

  /// Starts a request; its reply is added to `replies_`.
  std::shared_ptr<CancelScope> Send(const std::string& method = kScoreMethod,
                                    std::shared_ptr<CallVersions> versions = nullptr) {
    std::shared_ptr<CancelScope> scope = balancing_->NewScope();
    scope->versions = std::move(versions);
    balancing_->Call({.method = method,
                      .body = Bytes("request"),
                      .deadline = fakes_->Now() + absl::Seconds(60),
                      .scope = scope},
                     [this](RpcReply reply) { replies_.push_back(std::move(reply)); });
    return scope;
  }

  /// Answers the pending health check and ListHeads of a server.
  void AnswerCheck(const std::string& address, int64_t vocab_size = 100, int64_t rows_max = 50) {
    FakeTransport& server = At(address);
    ASSERT_EQ(server.calls.back().method, kHealthMethod);
    server.Reply({.body = EncodeServing()}, server.calls.size() - 1);
    ASSERT_EQ(server.calls.back().method, kListHeadsMethod);
    v1::ListHeadsResponse response;
    v1::Head& head = *response.add_heads();
    head.set_name("h");
    head.set_vocab_size(static_cast<uint32_t>(vocab_size));
    head.set_dtype(v1::DTYPE_BF16);
    head.set_weights_version(1);
    head.mutable_limits()->set_request_rows_max(static_cast<uint32_t>(rows_max));
    server.Reply({.body = Bytes(response.SerializeAsString())}, server.calls.size() - 1);
  }

  /// Makes two servers whose checks have succeeded, with no request pending.
  void MakeReadyPair() {
    Make({"a:1", "b:2"});
    Send(kListHeadsMethod);
    AnswerCheck("a:1");
    AnswerCheck("b:2");
    ASSERT_EQ(replies_.size(), 1U);
    replies_.clear();
  }

  std::vector<State> StatesOf() const {
    std::vector<State> states;
    for (const ServerState& state : balancing_->balance().states()) states.push_back(state.state);
    return states;
  }

  FakeTransport& At(const std::string& address) { return fakes_->servers.at(address); }

  FakeServers* fakes_ = nullptr;
  std::unique_ptr<BalancingTransport> balancing_;
  std::vector<RpcReply> replies_;
};

TEST_F(BalancingTransportTest, SendsStraightToASingleServer) {
  Make({"a:1"});

  Send();

  ASSERT_EQ(At("a:1").calls.size(), 1U);  // no check
  At("a:1").Reply({.status = absl::UnavailableError("refused")});
  ASSERT_EQ(replies_.size(), 1U);
  EXPECT_FALSE(replies_[0].can_go_elsewhere);
  EXPECT_EQ(replies_[0].server, "a:1");
  Send();
  EXPECT_EQ(At("a:1").calls.size(), 1U);
}

TEST_F(BalancingTransportTest, NamesTheServerAndKeepsTheScopeOfARequest) {
  MakeReadyPair();

  const std::shared_ptr<CancelScope> scope = Send();

  ASSERT_EQ(At("a:1").calls.size(), 1U);
  EXPECT_EQ(At("a:1").calls[0].server, "a:1");
  EXPECT_EQ(At("a:1").calls[0].scope, scope);
}

TEST_F(BalancingTransportTest, ChecksHealthOverEveryConnectionBeforeTheFirstRequest) {
  Make({"a:1", "b:2"}, /*channels=*/3);

  Send();

  FakeTransport& a = At("a:1");
  ASSERT_EQ(a.calls.size(), 3U);
  EXPECT_EQ(a.calls[2].deadline, fakes_->timers.Now() + policy::kCheckTimeout);
  for (int i = 0; i < 2; ++i) a.Reply({.body = EncodeServing()});
  EXPECT_THAT(StatesOf(), ElementsAre(State::kUnknown, State::kUnknown));
  AnswerCheck("a:1");
  EXPECT_THAT(StatesOf(), ElementsAre(State::kReady, State::kUnknown));
  EXPECT_THAT(a.calls, IsEmpty());  // the other server's check may still succeed
  for (int i = 0; i < 3; ++i) {
    At("b:2").Reply({.status = absl::UnavailableError("refused")});
  }
  ASSERT_EQ(a.calls.size(), 1U);
  EXPECT_EQ(a.calls[0].method, kScoreMethod);
}

TEST_F(BalancingTransportTest, WaitsNoLongerThanAFirstLookForTheOthers) {
  Make({"a:1", "b:2"});
  Send();
  AnswerCheck("a:1");

  ASSERT_EQ(fakes_->timers.delays.size(), 2U);
  EXPECT_EQ(fakes_->timers.delays[0], absl::Seconds(60));
  EXPECT_EQ(fakes_->timers.delays[1], policy::kFirstLook);
  fakes_->timers.now += policy::kFirstLook;
  std::swap(fakes_->timers.timers[0], fakes_->timers.timers[1]);
  fakes_->timers.FireTimer();

  ASSERT_EQ(At("a:1").calls.size(), 1U);
  EXPECT_EQ(At("a:1").calls[0].method, kScoreMethod);
}

TEST_F(BalancingTransportTest, SaysThatAFailedRequestCanGoElsewhere) {
  MakeReadyPair();
  Send();
  Send();
  EXPECT_EQ(At("a:1").calls.size(), 1U);
  EXPECT_EQ(At("b:2").calls.size(), 1U);
  EXPECT_EQ(balancing_->CountServers(), 2);

  At("a:1").Reply({.status = absl::UnavailableError("refused")});

  EXPECT_TRUE(replies_[0].can_go_elsewhere);
  EXPECT_THAT(StatesOf(), ElementsAre(State::kOut, State::kReady));
  EXPECT_EQ(balancing_->balance().states()[0].reason, "UNAVAILABLE: refused");
  EXPECT_EQ(balancing_->CountServers(), 1);
  At("b:2").Reply({.status = absl::UnavailableError("refused")});
  EXPECT_FALSE(replies_[1].can_go_elsewhere);
}

// Regression: calls failed with CANCELLED when a server cancelled its requests at the end of a
// drain.
TEST_F(BalancingTransportTest, SendsElsewhereWhatAServerCancelled) {
  MakeReadyPair();
  Send();

  At("a:1").Reply({.status = absl::CancelledError("CANCELLED")});

  EXPECT_EQ(replies_[0].status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(replies_[0].status.message()), HasSubstr("the server cancelled"));
  EXPECT_TRUE(replies_[0].can_go_elsewhere);
  EXPECT_THAT(StatesOf(), ElementsAre(State::kOut, State::kReady));
}

TEST_F(BalancingTransportTest, BlamesNoServerForWhatItsCallerCancelled) {
  MakeReadyPair();
  const std::shared_ptr<CancelScope> scope = Send();

  scope->Cancel();
  At("a:1").Reply({.status = absl::CancelledError("CANCELLED")});

  EXPECT_EQ(replies_[0].status.code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(StatesOf(), ElementsAre(State::kReady, State::kReady));
}

TEST_F(BalancingTransportTest, PassesOverAServerForItsHint) {
  MakeReadyPair();
  Send();

  At("a:1").Reply({.status = absl::ResourceExhaustedError("full"), .pushback = absl::Seconds(3)});

  EXPECT_TRUE(replies_[0].can_go_elsewhere);
  for (int i = 0; i < 3; ++i) Send();
  EXPECT_EQ(At("b:2").calls.size(), 3U);
  fakes_->timers.now += absl::Seconds(3);
  Send();
  EXPECT_EQ(At("a:1").calls.size(), 1U);
}

TEST_F(BalancingTransportTest, DoesNotSendATooLargeMessageElsewhere) {
  MakeReadyPair();
  Send();

  At("a:1").Reply(
      {.status = absl::ResourceExhaustedError("Received message larger than max (9 vs. 5)")});

  EXPECT_FALSE(replies_[0].can_go_elsewhere);
  EXPECT_THAT(StatesOf(), ElementsAre(State::kReady, State::kReady));
}

TEST_F(BalancingTransportTest, ProbesAServerBeforeItComesBack) {
  MakeReadyPair();
  Send();
  At("a:1").Reply({.status = absl::UnavailableError("refused")});
  fakes_->timers.now += absl::Milliseconds(500);

  Send();
  EXPECT_EQ(At("b:2").calls.size(), 1U);
  ASSERT_EQ(At("a:1").calls.size(), 1U);
  At("a:1").Reply({.body = Bytes("\x08\x02")});
  EXPECT_THAT(balancing_->balance().states()[0].reason, HasSubstr("NOT_SERVING"));
  fakes_->timers.now += absl::Seconds(1);
  Send();
  AnswerCheck("a:1");

  EXPECT_THAT(StatesOf(), ElementsAre(State::kReady, State::kReady));
}

TEST_F(BalancingTransportTest, UsesAServerWithoutAHealthService) {
  Make({"a:1", "b:2"});
  Send();
  FakeTransport& a = At("a:1");

  a.Reply({.status = absl::UnimplementedError("no such method")});

  ASSERT_EQ(a.calls.size(), 1U);
  EXPECT_EQ(a.calls[0].method, kListHeadsMethod);
  a.Reply({.body = Bytes("not a message")});
  EXPECT_THAT(balancing_->balance().states()[0].reason, HasSubstr("ListHeadsResponse"));
}

TEST_F(BalancingTransportTest, NamesEachServerAndWhyWhenAllAreGone) {
  Make({"a:1", "b:2"});
  Send();

  At("a:1").Reply({.status = absl::UnavailableError("refused")});
  At("b:2").Reply({.status = absl::DeadlineExceededError("too late")});

  ASSERT_EQ(replies_.size(), 1U);
  EXPECT_EQ(replies_[0].status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(
      std::string(replies_[0].status.message()),
      "no server is available: a:1 (UNAVAILABLE: refused); b:2 (DEADLINE_EXCEEDED: too late)");
  EXPECT_FALSE(replies_[0].can_go_elsewhere);
  EXPECT_FALSE(replies_[0].is_explained);
}

TEST_F(BalancingTransportTest, RefusesDifferingHeads) {
  Make({"a:1", "b:2"});
  Send();

  AnswerCheck("a:1", /*vocab_size=*/100);
  AnswerCheck("b:2", /*vocab_size=*/99);

  ASSERT_EQ(replies_.size(), 1U);
  EXPECT_EQ(replies_[0].status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(replies_[0].is_explained);
}

TEST_F(BalancingTransportTest, ListsHeadsOfAllServersWithTheTightestLimits) {
  Make({"a:1", "b:2"});
  Send(kListHeadsMethod);

  AnswerCheck("a:1", 100, /*rows_max=*/30);
  EXPECT_THAT(replies_, IsEmpty());
  AnswerCheck("b:2", 100, /*rows_max=*/50);

  ASSERT_EQ(replies_.size(), 1U);
  absl::StatusOr<ServerInfo> info = ParseListHeads(replies_[0].body);
  ASSERT_TRUE(info.ok()) << info.status();
  balancing_->LowerLimits(*info);
  EXPECT_EQ(info->heads[0].limits.request_rows_max, 30);
}

TEST_F(BalancingTransportTest, AnswersHealthFromTheStateOfAllServers) {
  Make({"a:1", "b:2"});
  Send(kHealthMethod);

  AnswerCheck("a:1");
  At("b:2").Reply({.status = absl::UnavailableError("refused")});

  ASSERT_EQ(replies_.size(), 1U);
  ASSERT_TRUE(replies_[0].status.ok()) << replies_[0].status;
  EXPECT_TRUE(*IsServing(replies_[0].body));
}

TEST_F(BalancingTransportTest, FindsThePinnedVersionWhereItIsHeld) {
  MakeReadyPair();
  auto versions =
      std::make_shared<CallVersions>(balancing_->balance(), CallVersions::Options{.pinned = 9});
  Send(kScoreMethod, versions);
  At("a:1").Reply({.status = absl::FailedPreconditionError("not live")});
  EXPECT_TRUE(replies_[0].can_go_elsewhere);

  Send(kScoreMethod, versions);
  At("b:2").Reply({.status = absl::FailedPreconditionError("not live")});

  EXPECT_FALSE(replies_[1].can_go_elsewhere);
  EXPECT_EQ(replies_[1].status.code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(replies_[1].is_explained);
  EXPECT_THAT(std::string(replies_[1].status.message()), HasSubstr("a:1, b:2"));
}

TEST_F(BalancingTransportTest, EndsWhatWaitsAtItsDeadline) {
  Make({"a:1", "b:2"});
  Send();

  fakes_->timers.FireTimer();

  ASSERT_EQ(replies_.size(), 1U);
  EXPECT_THAT(std::string(replies_[0].status.message()), HasSubstr("a:1 (no answer yet)"));
}

TEST_F(BalancingTransportTest, CancelsCallsAfterShutdown) {
  MakeReadyPair();

  balancing_->Shutdown();
  Send();

  ASSERT_EQ(replies_.size(), 1U);
  EXPECT_EQ(replies_[0].status.code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace logprobd::client
