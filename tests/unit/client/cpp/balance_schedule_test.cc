// Random schedules of refusals, failures, checks and changes of addresses, against a model of what
// they mean: it keeps each event and derives the state of a server from all of them, where Balance
// updates its record.

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/balance.h"
#include "client/cpp/policy.h"
#include "gtest/gtest.h"
#include "tests/support/draws.h"

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
  std::vector<std::pair<Balance::Taken, int64_t>> requests = {};  ///< Unanswered, with their bytes.
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
    for (const auto& [taken, bytes] : requests) sum += bytes;
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
      : draws_(seed),
        balance_(
            {.solo = false,
             .now = [this] { return now_; },
             .unit_random = [this] { return static_cast<double>(draws_.Between(0, 999)) / 1000; }},
            {"a", "b", "c"}),
        listed_({{"a", {}}, {"b", {}}, {"c", {}}}) {}

  void Run() {
    using Event = void (Schedule::*)();
    constexpr std::array<Event, 10> kEvents = {&Schedule::Take,
                                               &Schedule::Release,
                                               &Schedule::ReleaseOfRemoved,
                                               &Schedule::Wait,
                                               &Schedule::BeginChecks,
                                               &Schedule::EndCheck,
                                               &Schedule::EndCheckOfRemoved,
                                               &Schedule::Refuse,
                                               &Schedule::Fail,
                                               &Schedule::ChangeAddresses};
    for (int step = 0; step < kSteps && !::testing::Test::HasFatalFailure(); ++step) {
      (this->*kEvents[draws_.ByWeight({8, 6, 2, 4, 3, 5, 2, 3, 1, 1})])();
      if (!::testing::Test::HasFatalFailure()) CompareStates();
    }
  }

 private:
  /// Returns a random address of those that `has` names, or "".
  std::string AddressWhere(const std::function<bool(const Past&)>& has) {
    std::vector<std::string> found;
    for (const auto& [address, past] : listed_) {
      if (has(past)) found.push_back(address);
    }
    return found.empty() ? "" : draws_.OneOf(found);
  }

  void Take() {
    const int64_t bytes = draws_.Between(1, 10);
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
    chosen.requests.emplace_back(**taken, bytes);
  }

  void Release() {
    const std::string address = AddressWhere([](const Past& past) { return past.bytes() > 0; });
    if (address.empty()) return;
    ReleaseLast(listed_[address].requests);
  }

  void ReleaseOfRemoved() {
    if (!of_removed_.empty()) ReleaseLast(of_removed_);
  }

  void ReleaseLast(std::vector<std::pair<Balance::Taken, int64_t>>& requests) {
    balance_.Release(requests.back().first, requests.back().second);
    requests.pop_back();
  }

  void Wait() {
    constexpr std::array kTimes = {absl::Milliseconds(10), absl::Milliseconds(300),
                                   absl::Seconds(2), policy::kCheck};
    now_ += draws_.OneOf(kTimes);
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
    if (draws_.Chance(25)) {
      balance_.Checked(address, absl::UnavailableError("no answer"), began);
      past.left.push_back(now_);
      past.is_ready = false;
      return;
    }
    const int64_t vocab_size = draws_.Chance(10) ? 11 : 10;
    balance_.Checked(address, InfoOf(vocab_size), began);
    if (!past.is_ready && !past.left.empty() && past.left.back() > began) return;
    past.is_ready = true;
    past.checked_at = now_;
    past.vocab_size = vocab_size;
  }

  void EndCheckOfRemoved() {
    if (checks_of_removed_.empty()) return;
    const auto& [address, began] = checks_of_removed_.back();
    if (draws_.Chance(50)) {
      balance_.Checked(address, absl::UnavailableError("no answer"), began);
    } else {
      balance_.Checked(address, InfoOf(10), began);
    }
    checks_of_removed_.pop_back();
  }

  void Refuse() {
    const std::string address = AddressWhere([](const Past& past) { return past.is_ready; });
    if (address.empty()) return;
    const std::array<std::optional<absl::Duration>, 4> hints = {
        absl::ZeroDuration(), absl::Milliseconds(200), absl::Seconds(3), std::nullopt};
    const std::optional<absl::Duration> hint = draws_.OneOf(hints);
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

  /// Removes and adds servers.
  void ChangeAddresses() {
    now_ += absl::Milliseconds(1);
    std::map<std::string, Past> changed;
    std::vector<std::string> addresses;
    for (int i = 0; i < kNumAddresses; ++i) {
      const std::string address(1, static_cast<char>('a' + i));
      const auto known = listed_.find(address);
      if (draws_.Chance(50)) continue;
      changed[address] = known == listed_.end() ? Past{} : known->second;
      addresses.push_back(address);
    }
    if (addresses.empty()) return;
    balance_.SetAddresses(addresses);
    for (auto& [address, past] : listed_) {
      if (changed.count(address) == 1) continue;
      of_removed_.insert(of_removed_.end(), past.requests.begin(), past.requests.end());
      if (past.check_began.has_value()) checks_of_removed_.emplace_back(address, *past.check_began);
    }
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

  testing::Draws draws_;
  absl::Time now_ = absl::UnixEpoch() + absl::Seconds(1000);
  Balance balance_;
  std::map<std::string, Past> listed_;
  std::vector<std::pair<Balance::Taken, int64_t>> of_removed_;         ///< Unanswered requests.
  std::vector<std::pair<std::string, absl::Time>> checks_of_removed_;  ///< They still run.
};

TEST(BalanceScheduleTest, EveryChoiceFollowsFromTheEventsBeforeIt) {
  for (const uint32_t seed : testing::SeedsOfDraws(kSchedules)) {
    SCOPED_TRACE(seed);
    Schedule(seed).Run();
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace logprobd::client
