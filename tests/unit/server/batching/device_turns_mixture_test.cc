// Random heads that take, withdraw and give back turns on random devices. A model, which follows
// the comment of DeviceTurns in the simplest way, says who has each turn and who is woken.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/base/scoring_engine.h"
#include "server/batching/device_turns.h"
#include "tests/support/draws.h"

namespace logprobd::testing {
namespace {

constexpr int kBatches = ScoringEngine::kBatchesInFlight;

bool Share(const DeviceTurns::Lane& a, const DeviceTurns::Lane& b) {
  return absl::c_any_of(a.devices, [&b](const std::string& device) {
    return absl::c_linear_search(b.devices, device);
  });
}

/// Says which turns DeviceTurns must give.
class TurnsModel {
 public:
  explicit TurnsModel(std::vector<DeviceTurns::Head> heads) : heads_(std::move(heads)) {
    for (size_t head = 0; head < heads_.size(); ++head) {
      states_.push_back({.group = head, .lanes = std::vector<Lane>(heads_[head].lanes.size())});
    }
    // Heads that share a device have one group, the lowest number among them.
    for (size_t round = 0; round < heads_.size(); ++round) {
      for (size_t a = 0; a < heads_.size(); ++a) {
        for (size_t b = 0; b < heads_.size(); ++b) {
          for (const auto& lane : heads_[a].lanes) {
            for (const auto& other : heads_[b].lanes) {
              if (Share(lane, other)) {
                states_[a].group = std::min(states_[a].group, states_[b].group);
              }
            }
          }
        }
      }
    }
  }

  std::optional<int> Take(size_t head, const std::vector<int>& replicas) {
    Head& state = states_[head];
    double& time = time_[state.group];
    const bool is_idle = state.requested.empty() && NumInFlight(head) == 0;
    const double lag_max = is_idle ? 0 : kBatches * charge_max_[state.group];
    state.served = std::max(state.served, time - lag_max);
    state.requested = replicas;
    state.is_woken = false;
    const std::map<size_t, int> grants = Grants();
    const auto granted = grants.find(head);
    if (granted == grants.end()) return std::nullopt;
    Lane& lane = state.lanes[static_cast<size_t>(granted->second)];
    ++lane.in_flight;
    ++lane.of_hold;
    state.requested.clear();
    state.last_turn = ++num_turns_;
    time = std::max(time, state.served);
    return granted->second;
  }

  void Charge(size_t head, int64_t rows) {
    const double charge = static_cast<double>(std::max<int64_t>(rows, 128)) * heads_[head].row_cost;
    states_[head].served += charge;
    double& charge_max = charge_max_[states_[head].group];
    charge_max = std::max(charge_max, charge);
  }

  void GiveBack(size_t head, int replica) {
    Lane& lane = states_[head].lanes[static_cast<size_t>(replica)];
    if (--lane.in_flight == 0) lane.of_hold = 0;
  }

  void Withdraw(size_t head) { states_[head].requested.clear(); }

  /// Returns the heads that are woken by the last change.
  std::set<size_t> Wake() {
    std::set<size_t> woken;
    for (const auto& [head, replica] : Grants()) {
      if (!std::exchange(states_[head].is_woken, true)) woken.insert(head);
    }
    return woken;
  }

  int NumInFlight(size_t head) const {
    int count = 0;
    for (const Lane& lane : states_[head].lanes) count += lane.in_flight;
    return count;
  }
  int NumInFlight(size_t head, size_t lane) const { return states_[head].lanes[lane].in_flight; }
  bool is_waiting(size_t head) const { return !states_[head].requested.empty(); }
  double charge_max(size_t head) const { return charge_max_.at(states_[head].group); }
  size_t group(size_t head) const { return states_[head].group; }

 private:
  struct Lane {
    int in_flight = 0;
    int of_hold = 0;  ///< Turns since it was last idle.
  };
  struct Head {
    size_t group;
    std::vector<Lane> lanes;
    std::vector<int> requested = {};
    double served = 0;
    int64_t last_turn = 0;
    bool is_woken = false;
  };

  const DeviceTurns::Lane& LaneOf(size_t head, int replica) const {
    return heads_[head].lanes[static_cast<size_t>(replica)];
  }

  /// The most batches that any head alone could have in flight on a device.
  int Capacity(const std::string& device) const {
    int capacity = 0;
    for (const DeviceTurns::Head& head : heads_) {
      const auto lanes = absl::c_count_if(head.lanes, [&device](const DeviceTurns::Lane& lane) {
        return absl::c_linear_search(lane.devices, device);
      });
      capacity = std::max(capacity, kBatches * static_cast<int>(lanes));
    }
    return capacity;
  }

  bool HoldsDevices(size_t head) const {
    return absl::c_any_of(states_[head].requested, [&](int replica) {
      const Lane& lane = states_[head].lanes[static_cast<size_t>(replica)];
      return LaneOf(head, replica).waits_for_peers && lane.in_flight > 0 && lane.of_hold < kBatches;
    });
  }

  /// Returns which heads can have a turn now, and on which replica.
  std::map<size_t, int> Grants() const {
    std::vector<std::pair<size_t, int>> used;  // Lanes with a batch, one entry for each.
    for (size_t head = 0; head < states_.size(); ++head) {
      for (size_t lane = 0; lane < states_[head].lanes.size(); ++lane) {
        for (int i = 0; i < states_[head].lanes[lane].in_flight; ++i) {
          used.emplace_back(head, static_cast<int>(lane));
        }
      }
    }
    std::set<std::string> reserved;
    const auto fits = [&](size_t head, int replica) {
      const DeviceTurns::Lane& lane = LaneOf(head, replica);
      for (const std::string& device : lane.devices) {
        if (reserved.contains(device)) return false;
        int count = 0;
        for (const auto& [other, other_replica] : used) {
          const DeviceTurns::Lane& other_lane = LaneOf(other, other_replica);
          if (!absl::c_linear_search(other_lane.devices, device)) continue;
          ++count;
          const bool is_same = other == head && other_replica == replica;
          if (lane.waits_for_peers && other_lane.waits_for_peers && !is_same) return false;
        }
        if (count >= Capacity(device)) return false;
      }
      return true;
    };
    std::map<size_t, int> grants;
    std::vector<std::tuple<bool, double, int64_t, size_t>> order;
    for (size_t head = 0; head < states_.size(); ++head) {
      if (!is_waiting(head)) continue;
      order.emplace_back(!HoldsDevices(head), states_[head].served, states_[head].last_turn, head);
    }
    absl::c_sort(order);
    for (const auto& key : order) {
      const size_t head = std::get<3>(key);
      bool is_granted = false;
      for (const int replica : states_[head].requested) {
        if (is_granted || !fits(head, replica)) continue;
        is_granted = true;
        grants[head] = replica;
        used.emplace_back(head, replica);
      }
      if (is_granted) continue;
      for (const std::string& device : LaneOf(head, states_[head].requested.front()).devices) {
        reserved.insert(device);
      }
    }
    return grants;
  }

  const std::vector<DeviceTurns::Head> heads_;
  std::vector<Head> states_;
  std::map<size_t, double> time_;  // By group, like charge_max_.
  std::map<size_t, double> charge_max_;
  int64_t num_turns_ = 0;
};

/// DeviceTurns beside its model, with the heads of one draw.
class TurnsMixture {
 public:
  TurnsMixture(std::vector<DeviceTurns::Head> heads, Draws& draws)
      : heads_(std::move(heads)), draws_(draws), turns_(heads_), model_(heads_) {
    for (size_t head = 0; head < heads_.size(); ++head) {
      turns_.SetWake(static_cast<int>(head), [this, head] {
        EXPECT_TRUE(woken_.insert(head).second) << "head " << head << " is woken twice";
      });
    }
    received_.resize(heads_.size());
  }

  size_t num_heads() const { return heads_.size(); }
  TurnsModel& model() { return model_; }
  /// The work that a head has received.
  double received(size_t head) const { return received_[head]; }

  /// Takes a turn on one of `replicas` for a batch of `rows`.
  bool Take(size_t head, const std::vector<int>& replicas, int64_t rows) {
    const std::optional<int> expected = model_.Take(head, replicas);
    const std::optional<int> taken = turns_.Take(static_cast<int>(head), replicas);
    EXPECT_EQ(taken, expected) << "head " << head;
    Check();
    if (!expected.has_value()) return false;
    in_flight_.emplace_back(head, *expected);
    model_.Charge(head, rows);
    turns_.Charge(static_cast<int>(head), rows);
    received_[head] += static_cast<double>(std::max<int64_t>(rows, 128)) * heads_[head].row_cost;
    return true;
  }

  void GiveBackOne() {
    if (in_flight_.empty()) return;
    const auto index = static_cast<size_t>(draws_.Between(0, std::ssize(in_flight_) - 1));
    const auto [head, replica] = in_flight_[index];
    in_flight_.erase(in_flight_.begin() + static_cast<ptrdiff_t>(index));
    model_.GiveBack(head, replica);
    turns_.GiveBack(static_cast<int>(head), replica);
    Check();
  }

  void Withdraw(size_t head) {
    model_.Withdraw(head);
    turns_.Withdraw(static_cast<int>(head));
    Check();
  }

  /// Returns some replicas of the head, in any order.
  std::vector<int> SomeReplicas(size_t head) {
    std::vector<int> replicas;
    for (size_t lane = 0; lane < heads_[head].lanes.size(); ++lane) {
      const auto place = draws_.Between(0, std::ssize(replicas));
      if (draws_.Chance(70)) replicas.insert(replicas.begin() + place, static_cast<int>(lane));
    }
    if (replicas.empty()) replicas.push_back(0);
    return replicas;
  }

  void EndAll() {
    for (size_t head = 0; head < heads_.size(); ++head) Withdraw(head);
    while (!in_flight_.empty()) GiveBackOne();
  }

  bool is_idle() const { return in_flight_.empty(); }

 private:
  /// Checks what was promised, and that those are woken whom the model wakes.
  void Check() {
    EXPECT_EQ(woken_, model_.Wake());
    woken_.clear();
    std::map<std::string, int> in_flight;
    std::map<std::string, int> most;
    for (size_t head = 0; head < heads_.size(); ++head) {
      std::map<std::string, int> alone;
      for (size_t lane = 0; lane < heads_[head].lanes.size(); ++lane) {
        for (const std::string& device : heads_[head].lanes[lane].devices) {
          in_flight[device] += model_.NumInFlight(head, lane);
          alone[device] += kBatches;
          most[device] = std::max(most[device], alone[device]);
        }
      }
    }
    for (const auto& [device, count] : in_flight) EXPECT_LE(count, most[device]) << device;
    for (const auto& [a, a_replica] : in_flight_) {
      for (const auto& [b, b_replica] : in_flight_) {
        const auto& lane = heads_[a].lanes[static_cast<size_t>(a_replica)];
        const auto& other = heads_[b].lanes[static_cast<size_t>(b_replica)];
        const bool is_same = a == b && a_replica == b_replica;
        EXPECT_TRUE(is_same || !lane.waits_for_peers || !other.waits_for_peers ||
                    !Share(lane, other))
            << "kernels of heads " << a << " and " << b << " could wait for each other";
      }
    }
  }

  const std::vector<DeviceTurns::Head> heads_;
  Draws& draws_;
  DeviceTurns turns_;
  TurnsModel model_;
  std::vector<std::pair<size_t, int>> in_flight_;
  std::vector<double> received_;
  std::set<size_t> woken_;
};

std::vector<DeviceTurns::Head> SomeHeads(Draws& draws) {
  std::vector<DeviceTurns::Head> heads(static_cast<size_t>(draws.Between(2, 5)));
  for (DeviceTurns::Head& head : heads) {
    head.row_cost = static_cast<double>(draws.Between(1, 5));
    head.lanes.resize(static_cast<size_t>(draws.Between(1, 3)));
    const bool are_teams = draws.Chance(40);
    for (DeviceTurns::Lane& lane : head.lanes) {
      lane.waits_for_peers = are_teams;
      for (int gpu = 0; gpu < 4; ++gpu) {
        if (draws.Chance(are_teams ? 50 : 0)) lane.devices.push_back(absl::StrCat("gpu", gpu));
      }
      if (lane.devices.empty()) lane.devices = {absl::StrCat("gpu", draws.Between(0, 3))};
    }
  }
  return heads;
}

int64_t SomeRows(Draws& draws) {
  constexpr int64_t kRows[] = {1, 127, 128, 129, 1'000, 8'192};
  return draws.OneOf(kRows);
}

TEST(DeviceTurnsMixtureTest, GivesEachTurnToTheHeadThatTheRulesNameAndWakesIt) {
  for (const uint32_t seed : SeedsOfDraws(300)) {
    SCOPED_TRACE(absl::StrCat("LOGPROBD_TEST_SEED=", seed));
    Draws draws(seed);
    TurnsMixture mixture(SomeHeads(draws), draws);
    for (int step = 0; step < 120 && !HasFailure(); ++step) {
      const auto head =
          static_cast<size_t>(draws.Between(0, static_cast<int64_t>(mixture.num_heads()) - 1));
      switch (draws.ByWeight({55, 35, 10})) {
        case 0:
          mixture.Take(head, mixture.SomeReplicas(head), SomeRows(draws));
          break;
        case 1:
          mixture.GiveBackOne();
          break;
        default:
          mixture.Withdraw(head);
      }
    }
    mixture.EndAll();
    // Nothing is left: each replica can have both of its turns.
    for (size_t head = 0; head < mixture.num_heads(); ++head) {
      EXPECT_TRUE(mixture.Take(head, {0}, 1) && mixture.Take(head, {0}, 1)) << head;
      mixture.EndAll();
    }
    if (HasFailure()) break;
  }
}

// A head may be behind by the work of its two batches and ahead by that of one, each of which is at
// most the largest. Whatever was before, what two heads with endless work receive therefore never
// differs by more than six of these from any time on.
TEST(DeviceTurnsMixtureTest, HeadsWithEndlessWorkOnADeviceReceiveTheSameFromAnyTimeOn) {
  for (const uint32_t seed : SeedsOfDraws(60)) {
    SCOPED_TRACE(absl::StrCat("LOGPROBD_TEST_SEED=", seed));
    Draws draws(seed);
    std::vector<DeviceTurns::Head> heads(static_cast<size_t>(draws.Between(2, 4)));
    for (DeviceTurns::Head& head : heads) {
      head = {.lanes = {{.devices = {"gpu0"}}},
              .row_cost = static_cast<double>(draws.Between(1, 5))};
    }
    const size_t num_heads = heads.size();
    TurnsMixture mixture(std::move(heads), draws);
    for (int step = 0; step < 60; ++step) {
      const auto head = static_cast<size_t>(draws.Between(0, static_cast<int64_t>(num_heads) - 1));
      if (draws.Chance(60)) mixture.Take(head, {0}, SomeRows(draws));
      if (draws.Chance(50)) mixture.GiveBackOne();
      if (draws.Chance(30)) mixture.Withdraw(head);
    }

    std::map<std::pair<size_t, size_t>, std::pair<double, double>> range;  // Of the difference.
    for (int batch = 0; batch < 300 && !HasFailure(); ++batch) {
      for (bool any = true; any;) {
        any = false;
        for (size_t head = 0; head < num_heads; ++head) {
          any = mixture.Take(head, {0}, SomeRows(draws)) || any;
        }
      }
      for (size_t a = 0; a < num_heads; ++a) {
        for (size_t b = 0; b < a; ++b) {
          const double difference = mixture.received(a) - mixture.received(b);
          auto& [least, most] = range.try_emplace({a, b}, difference, difference).first->second;
          least = std::min(least, difference);
          most = std::max(most, difference);
          EXPECT_LE(most - least, 6 * mixture.model().charge_max(0)) << a << " and " << b;
        }
      }
      mixture.GiveBackOne();
    }
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace logprobd::testing
