#include "server/batching/device_turns.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "server/base/errors.h"
#include "server/base/scoring_engine.h"

namespace logprobd {

DeviceTurns::DeviceTurns(const std::vector<Head>& heads) {
  std::map<std::string, size_t> devices;
  const absl::MutexLock lock(&mutex_);
  for (const Head& head : heads) {
    LOGPROBD_CHECK(head.row_cost > 0, head.row_cost);
    HeadState state;
    state.row_cost = head.row_cost;
    state.group = heads_.size();
    std::map<size_t, int> batches;  // This head's maximum of batches in flight, by device.
    for (const Lane& lane : head.lanes) {
      LaneState lane_state;
      lane_state.waits_for_peers = lane.waits_for_peers;
      for (const std::string& device : lane.devices) {
        const size_t index = devices.emplace(device, devices.size()).first->second;
        lane_state.devices.push_back(index);
        batches[index] += ScoringEngine::kBatchesInFlight;
      }
      state.lanes.push_back(std::move(lane_state));
    }
    capacity_.resize(devices.size());
    for (const auto& [device, count] : batches) {
      capacity_[device] = std::max(capacity_[device], count);
    }
    heads_.push_back(std::move(state));
    wakers_.push_back(std::make_unique<Waker>());
  }
  groups_.resize(heads_.size());
  // Heads that share a device belong to the same group, and this relation is transitive.
  std::vector<size_t> group_of_device(capacity_.size(), heads_.size());
  for (HeadState& head : heads_) {
    for (const LaneState& lane : head.lanes) {
      for (const size_t device : lane.devices) {
        const size_t other = std::exchange(group_of_device[device], head.group);
        if (other == heads_.size() || other == head.group) continue;
        for (HeadState& joined : heads_) {
          joined.group = joined.group == other ? head.group : joined.group;
        }
        std::replace(group_of_device.begin(), group_of_device.end(), other, head.group);
      }
    }
  }
}

void DeviceTurns::SetWake(int head, std::function<void()> wake) {
  Waker& waker = *wakers_[static_cast<size_t>(head)];
  const absl::MutexLock lock(&waker.mutex);
  waker.wake = std::move(wake);
}

std::optional<int> DeviceTurns::Take(int head, absl::Span<const int> replicas) {
  const auto index = static_cast<size_t>(head);
  std::vector<size_t> wakeable;
  std::optional<int> taken;
  {
    const absl::MutexLock lock(&mutex_);
    HeadState& state = heads_[index];
    Group& group = groups_[state.group];
    const bool was_idle = state.requested.empty() && state.in_flight == 0;
    const double lag_max = was_idle ? 0 : ScoringEngine::kBatchesInFlight * group.charge_max;
    state.served = std::max(state.served, group.time - lag_max);
    state.requested.assign(replicas.begin(), replicas.end());
    state.is_woken = false;
    for (const Grant& grant : GrantsLocked()) {
      if (grant.head == index) taken = grant.replica;
    }
    if (taken.has_value()) {
      LaneState& lane = state.lanes[static_cast<size_t>(*taken)];
      ++lane.in_flight;
      ++lane.taken_in_hold;
      ++state.in_flight;
      state.requested.clear();
      state.last_turn = ++num_turns_;
      group.time = std::max(group.time, state.served);
    }
    wakeable = WakeableLocked();
  }
  Wake(wakeable);  // This head is never included: it has its turn or cannot have it.
  return taken;
}

void DeviceTurns::Charge(int head, int64_t rows) {
  const absl::MutexLock lock(&mutex_);
  HeadState& state = heads_[static_cast<size_t>(head)];
  const double charge = static_cast<double>(std::max(rows, kBatchRowsMin)) * state.row_cost;
  state.served += charge;
  Group& group = groups_[state.group];
  group.charge_max = std::max(group.charge_max, charge);
}

void DeviceTurns::GiveBack(int head, int replica) {
  std::vector<size_t> wakeable;
  {
    const absl::MutexLock lock(&mutex_);
    HeadState& state = heads_[static_cast<size_t>(head)];
    LaneState& lane = state.lanes[static_cast<size_t>(replica)];
    LOGPROBD_CHECK(lane.in_flight > 0, head, " ", replica);
    --state.in_flight;
    if (--lane.in_flight == 0) lane.taken_in_hold = 0;
    wakeable = WakeableLocked();
  }
  Wake(wakeable);
}

void DeviceTurns::Withdraw(int head) {
  std::vector<size_t> wakeable;
  {
    const absl::MutexLock lock(&mutex_);
    heads_[static_cast<size_t>(head)].requested.clear();
    wakeable = WakeableLocked();
  }
  Wake(wakeable);
}

bool DeviceTurns::Fits(const LaneState& lane, const Room& room) {
  return absl::c_all_of(lane.devices, [&](size_t device) {
    const LaneState* const holder = room.holders[device];
    return room.batches[device] > 0 &&
           (!lane.waits_for_peers || holder == nullptr || holder == &lane);
  });
}

void DeviceTurns::Occupy(const LaneState& lane, Room& room) {
  for (const size_t device : lane.devices) {
    --room.batches[device];
    if (lane.waits_for_peers) room.holders[device] = &lane;
  }
}

DeviceTurns::Room DeviceTurns::RoomLocked() const {
  Room room{.batches = capacity_, .holders = {}};
  room.holders.resize(capacity_.size());
  for (const HeadState& head : heads_) {
    for (const LaneState& lane : head.lanes) {
      for (int batch = 0; batch < lane.in_flight; ++batch) Occupy(lane, room);
    }
  }
  return room;
}

bool DeviceTurns::IsInHold(const HeadState& head) {
  return absl::c_any_of(head.requested, [&head](int replica) {
    const LaneState& lane = head.lanes[static_cast<size_t>(replica)];
    return lane.waits_for_peers && lane.in_flight > 0 &&
           lane.taken_in_hold < ScoringEngine::kBatchesInFlight;
  });
}

std::vector<DeviceTurns::Grant> DeviceTurns::GrantsLocked() const {
  std::vector<std::tuple<bool, double, int64_t, size_t>> order;
  for (size_t index = 0; index < heads_.size(); ++index) {
    const HeadState& head = heads_[index];
    if (!head.requested.empty()) {
      order.emplace_back(!IsInHold(head), head.served, head.last_turn, index);
    }
  }
  absl::c_sort(order);
  Room room = RoomLocked();
  std::vector<Grant> grants;
  for (const auto& key : order) {
    const size_t index = std::get<size_t>(key);
    const HeadState& head = heads_[index];
    const auto replica = absl::c_find_if(head.requested, [&](int candidate) {
      return Fits(head.lanes[static_cast<size_t>(candidate)], room);
    });
    if (replica != head.requested.end()) {
      grants.push_back({index, *replica});
      Occupy(head.lanes[static_cast<size_t>(*replica)], room);
      continue;
    }
    // The devices that this head waits for are reserved for it. Otherwise a head that needs several
    // devices would never find all of them free.
    for (const size_t device : head.lanes[static_cast<size_t>(head.requested.front())].devices) {
      room.batches[device] = 0;
    }
  }
  return grants;
}

std::vector<size_t> DeviceTurns::WakeableLocked() {
  std::vector<size_t> wakeable;
  for (const Grant& grant : GrantsLocked()) {
    if (!std::exchange(heads_[grant.head].is_woken, true)) wakeable.push_back(grant.head);
  }
  return wakeable;
}

void DeviceTurns::Wake(const std::vector<size_t>& heads) {
  for (const size_t head : heads) {
    Waker& waker = *wakers_[head];
    const absl::MutexLock lock(&waker.mutex);
    if (waker.wake) waker.wake();
  }
}

}  // namespace logprobd
