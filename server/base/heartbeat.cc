#include "server/base/heartbeat.h"

#include <algorithm>

namespace logprobd {

std::shared_ptr<Heartbeat> Heartbeats::Add(Heartbeat::Owner owner) {
  auto heartbeat = std::make_shared<Heartbeat>(std::move(owner));
  const absl::MutexLock lock(&mutex_);
  all_.erase(
      std::remove_if(all_.begin(), all_.end(), [](const auto& old) { return old.expired(); }),
      all_.end());
  all_.push_back(heartbeat);
  return heartbeat;
}

std::vector<std::shared_ptr<const Heartbeat>> Heartbeats::All() const {
  std::vector<std::shared_ptr<const Heartbeat>> alive;
  const absl::MutexLock lock(&mutex_);
  for (const std::weak_ptr<const Heartbeat>& each : all_) {
    if (std::shared_ptr<const Heartbeat> heartbeat = each.lock(); heartbeat != nullptr) {
      alive.push_back(std::move(heartbeat));
    }
  }
  return alive;
}

std::shared_ptr<Heartbeat> AddHeartbeat(Heartbeats* table, Heartbeat::Owner owner) {
  return table == nullptr ? std::make_shared<Heartbeat>(std::move(owner))
                          : table->Add(std::move(owner));
}

}  // namespace logprobd
