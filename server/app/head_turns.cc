#include "server/app/head_turns.h"

#include <cstddef>
#include <map>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "server/base/head_info.h"

namespace logprobd {
namespace {

std::vector<DeviceTurns::Lane> LanesOf(const EnginePlan& plan) {
  std::vector<DeviceTurns::Lane> lanes(static_cast<size_t>(plan.num_replicas()));
  for (DeviceTurns::Lane& lane : lanes) {
    lane.waits_for_peers = WaitsForPeers(plan.layout);
  }
  for (const ShardPlace& place : plan.layout) {
    std::vector<std::string>& devices = lanes[static_cast<size_t>(place.replica)].devices;
    if (!absl::c_linear_search(devices, place.device)) {
      devices.push_back(place.device);
    }
  }
  return lanes;
}

}  // namespace

std::vector<DeviceTurns::Head> TurnHeadsOf(const ServerPlan& plan) {
  std::vector<DeviceTurns::Head> heads;
  std::map<std::string, size_t> first_head;  // by device
  bool is_any_shared = false;
  for (const ServingPlan& serving : plan.heads) {
    for (const ShardPlace& place : serving.engine.layout) {
      const auto [first, is_new] = first_head.emplace(place.device, heads.size());
      is_any_shared = is_any_shared || first->second != heads.size();
    }
    heads.push_back({.lanes = LanesOf(serving.engine),
                     .row_cost = static_cast<double>(serving.head.vocab_size) *
                                 static_cast<double>(serving.head.hidden_size)});
  }
  return is_any_shared ? heads : std::vector<DeviceTurns::Head>();
}

bool AnyWaitsForPeers(const std::vector<DeviceTurns::Head>& heads) {
  return absl::c_any_of(heads, [](const DeviceTurns::Head& head) {
    return absl::c_any_of(head.lanes,
                          [](const DeviceTurns::Lane& lane) { return lane.waits_for_peers; });
  });
}

}  // namespace logprobd
