// Random schedules of refusals, failures, checks and changes of addresses, against a model of what
// they mean: it keeps each event and derives the state of a server from all of them, where Balance
// updates its record.

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/balance.h"
#include "client/cpp/policy.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

constexpr uint32_t kSchedules = 200;
constexpr int kSteps = 150;
constexpr int kNumAddresses = 4;

ServerInfo InfoOf(int64_t vocab_size) {
  return {.heads = {{.name = "h",
                     .vocab_size = vocab_size,
                     .hidden_size = 4,
                     .weights_version = 1,
                     .limits = {.request_rows_max = 100}}}};
}

/// What has happened to a server since it was added.
struct Past {
  std::vector<std::pair<absl::Time, absl::Duration>> refusals = {};
  std::vector<absl::Time> left = {};  ///< Failures while it was in use, and failed checks.
  std::vector<int64_t> requests = {};
  absl::Time checked_at = absl::InfinitePast();
  int64_t vocab_size = 0;  ///< Of the last successful check.
  bool is_ready = false;
  std::optional<absl::Time> check_began = std::nullopt;

  bool IsBusy(absl::Time now) const {
    return std::any_of(refusals.begin(), refusals.end(),
                       [now](const auto& refusal) { return now < refusal.first + refusal.second; });
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const int64_t each : requests) sum += each;
    return sum;
  }
  absl::Duration pause_max() const {
    return std::min(policy::kBackoffMax,
                    policy::kBackoffFirst * (1 << std::min<size_t>(left.size() - 1, 20)));
  }
};

/// Draws events, and compares a Balance with what must follow from them.
class Schedule {
 public:
  explicit Schedule(uint32_t seed)
      : random_(seed),
        balance_({.solo = false,
                  .now = [this] { return now_; },
                  .unit_random = [this] { return std::uniform_real_distribution<>()(random_); }},
                 {"a", "b", "c"}),
        listed_({{"a", {}}, {"b", {}}, {"c", {}}}) {}

  void Run() {
    using Event = void (Schedule::*)();
    constexpr std::array<std::pair<Event, int>, 8> kWeights = {{{&Schedule::Take, 8},
                                                                {&Schedule::Release, 6},
                                                                {&Schedule::Wait, 4},
                                                                {&Schedule::BeginChecks, 3},
                                                                {&Schedule::EndCheck, 5},
                                                                {&Schedule::Refuse, 3},
                                                                {&Schedule::Fail, 1},
                                                                {&Schedule::ChangeAddresses, 1}}};
    std::vector<Event> events;
    for (const auto& [event, weight] : kWeights) events.insert(events.end(), weight, event);
    for (int step = 0; step < kSteps && !::testing::Test::HasFatalFailure(); ++step) {
      (this->*events[Draw(events.size())])();
      if (!::testing::Test::HasFatalFailure()) CompareStates();
    }
  }

 private:
  size_t Draw(size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random_); }

  /// Returns a random address of those that `has` names, or "".
  std::string AddressWhere(const std::function<bool(const Past&)>& has) {
    std::vector<std::string> found;
    for (const auto& [address, past] : listed_) {
      if (has(past)) found.push_back(address);
    }
    return found.empty() ? "" : found[Draw(found.size())];
  }

  void Take() {
    const auto bytes = static_cast<int64_t>(1 + Draw(10));
    std::set<int64_t> vocab_sizes;
    bool has_idle = false;
    for (const auto& [address, past] : listed_) {
      if (!past.is_ready) continue;
      vocab_sizes.insert(past.vocab_size);
      has_idle = has_idle || !past.IsBusy(now_);
    }
    const absl::StatusOr<std::optional<Balance::Taken>> taken = balance_.Take(bytes, {});
    ASSERT_EQ(taken.ok(), vocab_sizes.size() <= 1);
    if (!taken.ok()) return;
    ASSERT_EQ(taken->has_value(), !vocab_sizes.empty());
    if (!taken->has_value()) return;
    ASSERT_EQ(listed_.count((*taken)->address), 1U);
    Past& chosen = listed_[(*taken)->address];
    ASSERT_TRUE(chosen.is_ready);
    ASSERT_TRUE(!has_idle || !chosen.IsBusy(now_));
    for (const auto& [address, past] : listed_) {
      if (past.is_ready && (!has_idle || !past.IsBusy(now_))) {
        ASSERT_LE(chosen.bytes(), past.bytes()) << address;
      }
    }
    chosen.requests.push_back(bytes);
  }

  void Release() {
    const std::string address = AddressWhere([](const Past& past) { return past.bytes() > 0; });
    if (address.empty()) return;
    std::vector<int64_t>& requests = listed_[address].requests;
    balance_.Release(address, requests.back());
    requests.pop_back();
  }

  void Wait() {
    constexpr std::array kTimes = {absl::Milliseconds(10), absl::Milliseconds(300),
                                   absl::Seconds(2), policy::kCheck};
    now_ += kTimes[Draw(kTimes.size())];
  }

  void BeginChecks() {
    const bool is_idle = AddressWhere([](const Past& past) { return past.is_ready; }).empty();
    const std::vector<std::string> due =
        balance_.TakeDueChecks(is_idle ? Balance::Due::kIdle : Balance::Due::kTimely);
    for (auto& [address, past] : listed_) {
      const bool is_due = std::count(due.begin(), due.end(), address) == 1;
      if (past.check_began.has_value()) {
        ASSERT_FALSE(is_due);
      } else if (is_due) {
        past.check_began = now_;
        if (!past.left.empty() && !past.is_ready && !is_idle) {
          ASSERT_GE(now_, past.left.back() + past.pause_max() / 2);
        }
      } else if (past.is_ready) {
        ASSERT_LT(now_, past.checked_at + policy::kCheck);
      } else {
        ASSERT_FALSE(is_idle);
        ASSERT_LT(now_, past.left.back() + past.pause_max());
      }
    }
  }

  void EndCheck() {
    const std::string address =
        AddressWhere([](const Past& past) { return past.check_began.has_value(); });
    if (address.empty()) return;
    Past& past = listed_[address];
    const absl::Time began = *std::exchange(past.check_began, std::nullopt);
    if (Draw(4) == 0) {
      balance_.Checked(address, absl::UnavailableError("no answer"), began);
      past.left.push_back(now_);
      past.is_ready = false;
      return;
    }
    const int64_t vocab_size = Draw(10) == 0 ? 11 : 10;
    balance_.Checked(address, InfoOf(vocab_size), began);
    if (!past.is_ready && !past.left.empty() && past.left.back() > began) return;
    past.is_ready = true;
    past.checked_at = now_;
    past.vocab_size = vocab_size;
  }

  void Refuse() {
    const std::string address = AddressWhere([](const Past& past) { return past.is_ready; });
    if (address.empty()) return;
    constexpr std::array kHints = {absl::ZeroDuration(), absl::Milliseconds(200), absl::Seconds(3)};
    const size_t choice = Draw(kHints.size() + 1);
    std::optional<absl::Duration> hint;
    if (choice < kHints.size()) hint = kHints[choice];
    balance_.Busy(address, hint);
    listed_[address].refusals.emplace_back(now_, hint.value_or(policy::kBusy));
  }

  void Fail() {
    const std::string address = AddressWhere([](const Past& past) { return past.is_ready; });
    if (address.empty()) return;
    balance_.Leave(address, "it has ended");
    listed_[address].left.push_back(now_);
    listed_[address].is_ready = false;
  }

  /// Removes and adds servers. One that still has a request or a check stays.
  void ChangeAddresses() {
    std::map<std::string, Past> changed;
    std::vector<std::string> addresses;
    for (int i = 0; i < kNumAddresses; ++i) {
      const std::string address(1, static_cast<char>('a' + i));
      const auto known = listed_.find(address);
      const bool must_stay = known != listed_.end() && (!known->second.requests.empty() ||
                                                        known->second.check_began.has_value());
      if (!must_stay && Draw(2) == 0) continue;
      changed[address] = known == listed_.end() ? Past{} : known->second;
      addresses.push_back(address);
    }
    if (addresses.empty()) return;
    balance_.SetAddresses(addresses);
    listed_ = std::move(changed);
  }

  void CompareStates() {
    const std::vector<ServerState> states = balance_.states();
    ASSERT_EQ(states.size(), listed_.size());
    int64_t num_checked = 0;
    for (const ServerState& state : states) {
      ASSERT_EQ(listed_.count(state.address), 1U);
      const Past& past = listed_[state.address];
      ASSERT_EQ(state.requests, static_cast<int64_t>(past.requests.size()));
      ASSERT_EQ(state.bytes, past.bytes());
      using State = ServerState::State;
      const State unused = past.left.empty() ? State::kUnknown : State::kOut;
      const State used = past.IsBusy(now_) ? State::kBusy : State::kReady;
      ASSERT_EQ(state.state, past.is_ready ? used : unused);
      num_checked += past.check_began.has_value() ? 1 : 0;
    }
    ASSERT_EQ(balance_.num_checked(), num_checked);
  }

  std::mt19937 random_;
  absl::Time now_ = absl::UnixEpoch() + absl::Seconds(1000);
  Balance balance_;
  std::map<std::string, Past> listed_;
};

TEST(BalanceScheduleTest, EveryChoiceFollowsFromTheEventsBeforeIt) {
  for (uint32_t seed = 0; seed < kSchedules; ++seed) {
    SCOPED_TRACE(seed);
    Schedule(seed).Run();
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace logprobd::client
