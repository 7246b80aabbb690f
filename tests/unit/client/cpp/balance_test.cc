#include "client/cpp/balance.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/policy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

using State = ServerState::State;

Head HeadOf(uint64_t version = 1) {
  return {.name = "h",
          .vocab_size = 10,
          .hidden_size = 4,
          .weights_version = version,
          .limits = {.request_rows_max = 100}};
}

class BalanceTest : public ::testing::Test {
 protected:
  Balance::Options Options(bool solo = false) {
    return {.solo = solo, .now = [this] { return now_; }, .unit_random = [] { return 1.0; }};
  }

  /// Reports a successful check for every server that is due for one.
  void CheckAll(Balance& balance) {
    for (const std::string& address : balance.TakeDueChecks(Balance::Due::kAll)) {
      balance.Checked(address, ServerInfo{.heads = {HeadOf()}}, now_);
    }
  }

  /// Returns the server of a request; its address is "" if there is none.
  static Balance::Taken TakeServer(Balance& balance, int64_t bytes,
                                   const ServerPreference& preference = {}) {
    const absl::StatusOr<std::optional<Balance::Taken>> taken = balance.Take(bytes, preference);
    EXPECT_TRUE(taken.ok()) << taken.status();
    return taken.ok() ? taken->value_or(Balance::Taken{}) : Balance::Taken{};
  }

  static std::string Take(Balance& balance, int64_t bytes,
                          const ServerPreference& preference = {}) {
    return TakeServer(balance, bytes, preference).address;
  }

  static std::vector<State> StatesOf(const Balance& balance) {
    std::vector<State> states;
    for (const ServerState& state : balance.states()) states.push_back(state.state);
    return states;
  }

  absl::Time now_ = absl::UnixEpoch() + absl::Seconds(1000);
};

TEST_F(BalanceTest, GivesTheServerWithTheFewestBytes) {
  Balance balance(Options(), {"a", "b", "c"});
  CheckAll(balance);

  std::vector<std::string> taken;
  for (const int64_t bytes : {10, 5, 1, 3, 3, 3}) taken.push_back(Take(balance, bytes));

  EXPECT_THAT(taken, ElementsAre("a", "b", "c", "c", "c", "b"));
}

TEST_F(BalanceTest, LetsEqualsTakeTurns) {
  Balance balance(Options(), {"a", "b", "c"});
  CheckAll(balance);

  std::vector<std::string> taken;
  for (int i = 0; i < 5; ++i) {
    const Balance::Taken server = TakeServer(balance, 10);
    taken.push_back(server.address);
    balance.Release(server, 10);
  }

  EXPECT_THAT(taken, ElementsAre("a", "b", "c", "a", "b"));
}

TEST_F(BalanceTest, TheOthersTakeTurnsWhileOneServerIsOut) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"a", {"b", "c", "b", "c", "b"}},
      {"b", {"a", "c", "a", "c", "a"}},
      {"c", {"a", "b", "a", "b", "a"}}};
  for (const auto& [out, expected] : cases) {
    Balance balance(Options(), {"a", "b", "c"});
    CheckAll(balance);
    balance.Leave(out, "gone");

    std::vector<std::string> taken;
    for (int i = 0; i < 5; ++i) {
      const Balance::Taken server = TakeServer(balance, 10);
      taken.push_back(server.address);
      balance.Release(server, 10);
    }

    EXPECT_EQ(taken, expected) << out;
  }
}

TEST_F(BalanceTest, UsesNoServerBeforeItsCheckHasSucceeded) {
  Balance balance(Options(), {"a", "b"});
  EXPECT_EQ(Take(balance, 1), "");

  EXPECT_THAT(balance.TakeDueChecks(Balance::Due::kTimely), ElementsAre("a", "b"));
  EXPECT_THAT(balance.TakeDueChecks(Balance::Due::kAll), IsEmpty());  // both checks are running
  balance.Checked("b", ServerInfo{.heads = {HeadOf()}}, now_);

  EXPECT_EQ(Take(balance, 1), "b");
  EXPECT_THAT(StatesOf(balance), ElementsAre(State::kUnknown, State::kReady));
  EXPECT_EQ(balance.num_checked(), 1);
}

TEST_F(BalanceTest, LeavesAFailedServerAtOnceForAPauseThatDoubles) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  std::vector<double> pauses;

  for (int i = 0; i < 8; ++i) {
    balance.Leave("a", "gone");
    balance.Leave("a", "another request of the same failure");
    EXPECT_EQ(Take(balance, 0), "b");
    EXPECT_EQ(Take(balance, 0), "b");
    pauses.push_back(absl::ToDoubleSeconds(balance.states()[0].retry_in));
    now_ += balance.states()[0].retry_in;
    EXPECT_THAT(balance.TakeDueChecks(Balance::Due::kTimely), ::testing::Contains("a"));
    balance.Checked("a", ServerInfo{.heads = {HeadOf()}}, now_);
  }

  EXPECT_THAT(pauses, ElementsAre(0.5, 1, 2, 4, 8, 16, 30, 30));
}

TEST_F(BalanceTest, EndsTheGrowthOfThePauseWithAnAnswer) {
  Balance balance(Options(), {"a", "b"});
  for (int i = 0; i < 3; ++i) {
    CheckAll(balance);
    balance.Leave("a", "gone");
  }
  CheckAll(balance);

  balance.SawVersion("a", "h", 1);
  balance.Leave("a", "gone");

  EXPECT_EQ(balance.states()[0].retry_in, absl::Milliseconds(500));
}

TEST_F(BalanceTest, ACheckThatIsOverdueIsDueNow) {
  Balance balance(Options(), {"a", "b"});
  balance.Leave("a", "gone");

  now_ += absl::Hours(1);

  EXPECT_EQ(balance.states()[0].retry_in, absl::ZeroDuration());
}

TEST_F(BalanceTest, DrawsThePauseFromItsUpperHalf) {
  Balance::Options options = Options();
  options.unit_random = [] { return 0.0; };
  Balance balance(options, {"a", "b"});

  balance.Leave("a", "gone");

  EXPECT_EQ(balance.states()[0].retry_in, absl::Milliseconds(250));
}

TEST_F(BalanceTest, IgnoresACheckThatBeganBeforeTheFailure) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  const absl::Time began = now_;
  now_ += absl::Seconds(1);
  balance.Leave("a", "gone");

  balance.Checked("a", ServerInfo{.heads = {HeadOf()}}, began);

  EXPECT_THAT(StatesOf(balance), ElementsAre(State::kOut, State::kReady));
  EXPECT_EQ(balance.states()[0].reason, "gone");
  EXPECT_EQ(balance.last_left(), now_);
}

TEST_F(BalanceTest, ChecksReadyServersAgain) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  EXPECT_THAT(balance.TakeDueChecks(Balance::Due::kTimely), IsEmpty());

  now_ += policy::kCheck;
  EXPECT_THAT(balance.TakeDueChecks(Balance::Due::kTimely), ElementsAre("a", "b"));
  balance.Checked("a", absl::UnavailableError("health says NOT_SERVING"), now_);

  EXPECT_THAT(StatesOf(balance), ElementsAre(State::kOut, State::kReady));
}

TEST_F(BalanceTest, CutsThePausesShortWithNobodyReady) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  balance.Leave("a", "gone");
  balance.Leave("b", "gone");

  EXPECT_THAT(balance.TakeDueChecks(Balance::Due::kTimely), IsEmpty());
  EXPECT_THAT(balance.TakeDueChecks(Balance::Due::kIdle), ElementsAre("a", "b"));
}

TEST_F(BalanceTest, PassesOverABusyServerForItsHint) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  balance.Busy("a", absl::Seconds(3));

  EXPECT_EQ(Take(balance, 5), "b");
  EXPECT_EQ(Take(balance, 5), "b");
  EXPECT_THAT(StatesOf(balance), ElementsAre(State::kBusy, State::kReady));
  EXPECT_FALSE(balance.HasOther("b", {}));
  now_ += absl::Seconds(3);
  EXPECT_EQ(Take(balance, 5), "a");
  EXPECT_TRUE(balance.HasOther("b", {}));
}

TEST_F(BalanceTest, ALaterRefusalDoesNotShortenAHint) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  balance.Busy("a", absl::Seconds(3));

  balance.Busy("a", std::nullopt);
  balance.Busy("a", absl::Milliseconds(1));

  now_ += absl::Seconds(3) - absl::Milliseconds(1);
  EXPECT_EQ(Take(balance, 5), "b");
  EXPECT_EQ(Take(balance, 5), "b");
  now_ += absl::Milliseconds(1);
  EXPECT_EQ(Take(balance, 5), "a");
}

TEST_F(BalanceTest, ANegativeHintDoesNotMakeAServerBusy) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);

  balance.Busy("a", -absl::Seconds(1));

  EXPECT_EQ(Take(balance, 5), "a");
}

TEST_F(BalanceTest, UsesBusyServersWhereThereIsNoOther) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  balance.Busy("a", std::nullopt);
  balance.Busy("b", std::nullopt);

  EXPECT_EQ(Take(balance, 5), "a");
  EXPECT_EQ(Take(balance, 5), "b");
}

TEST_F(BalanceTest, PrefersServersBelievedToHoldTheVersion) {
  Balance balance(Options(), {"a", "b", "c"});
  CheckAll(balance);
  balance.SawVersion("b", "", 2);

  EXPECT_EQ(Take(balance, 1, {.version = 2}), "b");
  EXPECT_EQ(Take(balance, 1, {.version = 2}), "b");
  EXPECT_EQ(Take(balance, 1, {.version = 2, .excluded = {"b"}}),
            "c");  // the known version is outdated
  now_ += policy::kVersion;
  EXPECT_EQ(Take(balance, 1, {.version = 2}), "a");
  EXPECT_EQ(Take(balance, 1, {.excluded = {"a", "b", "c"}}), "");
  EXPECT_FALSE(balance.HasReadyExcept({"a", "b", "c"}));
  EXPECT_TRUE(balance.HasReadyExcept({"a", "b"}));
}

TEST_F(BalanceTest, RefusesDifferingHeadsAndNamesBothServers) {
  Balance balance(Options(), {"a:1", "b:2"});
  CheckAll(balance);
  Head other = HeadOf();
  other.vocab_size = 11;

  balance.Checked("b:2", ServerInfo{.heads = {other}}, now_);

  const absl::Status status = balance.Take(1, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a:1 and b:2 hold different heads"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("vocab_size of \"h\" is 10 and 11"));
  EXPECT_EQ(balance.Heads({}).status(), status);
  balance.Leave("b:2", "gone");
  EXPECT_EQ(Take(balance, 1), "a:1");
}

TEST_F(BalanceTest, WorksAgainOnceAServerWithOtherHeadsIsRemoved) {
  Balance balance(Options(), {"a:1", "b:2"});
  CheckAll(balance);
  Head other = HeadOf();
  other.vocab_size = 11;
  balance.Checked("b:2", ServerInfo{.heads = {other}}, now_);
  ASSERT_FALSE(balance.Take(1, {}).ok());

  balance.SetAddresses({"a:1"});

  EXPECT_EQ(Take(balance, 1), "a:1");
  EXPECT_TRUE(balance.Heads({}).ok());
}

TEST_F(BalanceTest, KeepsTheTightestLimitAndTheVersionOfEach) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  Head other = HeadOf(/*version=*/7);
  other.limits.request_rows_max = 30;

  balance.Checked("b", ServerInfo{.heads = {other}}, now_);

  EXPECT_EQ(balance.Heads({})->heads[0].limits.request_rows_max, 30);
  EXPECT_THAT(balance.states()[0].weights_versions, ElementsAre(Pair("h", 1U)));
  EXPECT_THAT(balance.states()[1].weights_versions, ElementsAre(Pair("h", 7U)));
}

TEST_F(BalanceTest, RemembersServersThatStay) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  const Balance::Taken removed = TakeServer(balance, 1, {.excluded = {"b"}});
  EXPECT_EQ(Take(balance, 7, {.excluded = {"a"}}), "b");

  balance.SetAddresses({"b", "c"});
  balance.Release(removed, 1);

  ASSERT_EQ(balance.states().size(), 2U);
  EXPECT_EQ(balance.states()[0].address, "b");
  EXPECT_EQ(balance.states()[0].bytes, 7);
  EXPECT_THAT(StatesOf(balance), ElementsAre(State::kReady, State::kUnknown));
  EXPECT_THAT(balance.TakeDueChecks(Balance::Due::kTimely), ElementsAre("c"));
  EXPECT_THAT(balance.ready(), ElementsAre("b"));
}

TEST_F(BalanceTest, AServerThatIsAddedAgainHasNoBytesOfItsEarlierRequests) {
  Balance balance(Options(), {"a", "b"});
  CheckAll(balance);
  const Balance::Taken first = TakeServer(balance, 10, {.excluded = {"b"}});
  const Balance::Taken second = TakeServer(balance, 10, {.excluded = {"b"}});
  EXPECT_EQ(first.address, "a");

  balance.SetAddresses({"b"});
  balance.SetAddresses({"b", "a"});
  EXPECT_EQ(balance.states()[1].bytes, 0);
  balance.Release(first, 10);
  EXPECT_EQ(balance.states()[1].requests, 0);
  EXPECT_EQ(balance.states()[1].bytes, 0);

  CheckAll(balance);
  const Balance::Taken third = TakeServer(balance, 4, {.excluded = {"b"}});
  balance.Release(second, 10);
  EXPECT_EQ(balance.states()[1].requests, 1);
  EXPECT_EQ(balance.states()[1].bytes, 4);
  balance.Release(third, 4);
  EXPECT_EQ(balance.states()[1].requests, 0);
  EXPECT_EQ(balance.states()[1].bytes, 0);
}

TEST_F(BalanceTest, AServerThatIsAddedAgainIsNotJudgedByAnEarlierCheck) {
  Balance balance(Options(), {"a", "b"});
  balance.TakeDueChecks(Balance::Due::kAll);
  const absl::Time began = now_;
  now_ += absl::Milliseconds(1);
  balance.SetAddresses({"b"});
  balance.SetAddresses({"b", "a"});
  EXPECT_THAT(balance.TakeDueChecks(Balance::Due::kTimely), ElementsAre("a"));

  balance.Checked("a", absl::UnavailableError("refused"), began);

  EXPECT_EQ(balance.num_checked(), 2);  // those of b and of the new a
  balance.Checked("a", ServerInfo{.heads = {HeadOf()}}, now_);
  EXPECT_THAT(balance.ready(), ElementsAre("a"));
}

TEST_F(BalanceTest, AlwaysUsesASingleServer) {
  Balance balance(Options(/*solo=*/true), {"a"});
  EXPECT_EQ(Take(balance, 1), "a");

  balance.Leave("a", "gone");

  EXPECT_EQ(Take(balance, 1), "a");
  EXPECT_EQ(balance.states()[0].reason, "gone");
  EXPECT_EQ(balance.states()[0].requests, 2);
  balance.SawVersion("a", "", 3);
  EXPECT_THAT(StatesOf(balance), ElementsAre(State::kReady));
}

TEST_F(BalanceTest, NamesEachServerAndWhyWhenAllAreGone) {
  Balance balance(Options(), {"a:1", "b:2"});
  balance.Leave("a:1", "UNAVAILABLE: refused");

  const absl::Status status = balance.Heads({"dns:///x:1: unknown name"}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(std::string(status.message()),
            "no server is available: dns:///x:1: unknown name; a:1 (UNAVAILABLE: refused); b:2 (no "
            "answer yet)");
}

ServerInfo InfoOf(Head head) {
  head.name = std::string("h");
  return {.heads = {std::move(head)}};
}

TEST(DescribeDifferenceTest, NamesTheFirstFieldThatAffectsScores) {
  const ServerInfo one = InfoOf({.vocab_size = 10, .hidden_size = 4});

  EXPECT_EQ(DescribeDifference(one, one), "");
  EXPECT_EQ(DescribeDifference(one, InfoOf({.vocab_size = 11, .hidden_size = 4})),
            "vocab_size of \"h\" is 10 and 11");
  EXPECT_EQ(DescribeDifference(one, InfoOf({.vocab_size = 10, .hidden_size = 5})),
            "hidden_size of \"h\" is 4 and 5");
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.dtype = Dtype::kF32})),
            "dtype of \"h\" is bf16 and f32");
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.scale = 2.0F})), "scale of \"h\" is 1 and 2");
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.softcap = 30.0F})),
            "softcap of \"h\" is 0 and 30");
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.has_bias = true})),
            "has_bias of \"h\" is false and true");
  EXPECT_EQ(DescribeDifference(InfoOf({.model_type = "a"}), InfoOf({.model_type = "b"})),
            "model_type of \"h\" is a and b");
  EXPECT_EQ(DescribeDifference(InfoOf({}), {.heads = {{.name = "x"}, {.name = "h"}}}),
            "their names are \"h\" and \"h, x\"");
}

TEST(DescribeDifferenceTest, AllowsOtherVersionsEnginesAndLimits) {
  EXPECT_EQ(DescribeDifference(InfoOf({}), InfoOf({.weights_version = 7,
                                                   .tied = true,
                                                   .tensor = "t",
                                                   .engine = "cpu",
                                                   .limits = {.request_rows_max = 1}})),
            "");
}

TEST(TightestLimitsTest, TakesTheLeastOfEachThatIsKnown) {
  const ServerInfo one = InfoOf({.limits = {.message_bytes_max = 200,
                                            .request_rows_max = 7,
                                            .top_k_max = 0,
                                            .candidates_max = 40,
                                            .segments_max = 60,
                                            .stream_window = 8}});
  const ServerInfo two = InfoOf({.limits = {.message_bytes_max = 100,
                                            .request_rows_max = 9,
                                            .top_k_max = 5,
                                            .candidates_max = 30,
                                            .segments_max = 50,
                                            .stream_window = 4}});

  const Limits limits = TightestLimits({one, two}).heads[0].limits;

  EXPECT_EQ(limits.message_bytes_max, 100);
  EXPECT_EQ(limits.request_rows_max, 7);
  EXPECT_EQ(limits.top_k_max, 5);
  EXPECT_EQ(limits.candidates_max, 30);
  EXPECT_EQ(limits.segments_max, 50);
  EXPECT_EQ(limits.stream_window, 4);
}

TEST(TightestLimitsTest, ALimitOfOneIsKnown) {
  const ServerInfo one = InfoOf({.limits = {.request_rows_max = 1, .top_k_max = 1}});
  const ServerInfo two = InfoOf({.limits = {.request_rows_max = 9, .top_k_max = 5}});

  for (const std::vector<ServerInfo>& servers : {std::vector{one, two}, std::vector{two, one}}) {
    const Limits limits = TightestLimits(servers).heads[0].limits;
    EXPECT_EQ(limits.request_rows_max, 1);
    EXPECT_EQ(limits.top_k_max, 1);
  }
}

}  // namespace
}  // namespace logprobd::client
