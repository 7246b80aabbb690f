#include "server/app/run/watchdog.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/host.h"

namespace logprobd {

std::vector<HungThread> HangMeter::Look(
    absl::Time now, absl::Span<const std::shared_ptr<const Heartbeat>> heartbeats) {
  const absl::Duration step =
      std::clamp(now - last_look_, absl::ZeroDuration(), step_max_);  // zero at the first look
  last_look_ = now;
  SeenHeartbeats seen;
  std::vector<HungThread> still;
  for (const std::shared_ptr<const Heartbeat>& heartbeat : heartbeats) {
    if (!heartbeat->is_at_work()) continue;
    Seen current = {heartbeat->beats(), absl::ZeroDuration()};
    const auto before = seen_.find(heartbeat);
    if (before != seen_.end() && before->second.beats == current.beats) {
      current.still = before->second.still + step;
      still.push_back({heartbeat, current.still});
    }
    seen.emplace(heartbeat, current);
  }
  seen_ = std::move(seen);
  std::stable_sort(still.begin(), still.end(),
                   [](const HungThread& a, const HungThread& b) { return a.time > b.time; });
  return still;
}

absl::StatusOr<std::unique_ptr<Watchdog>> Watchdog::Create(Options options,
                                                           const Heartbeats& heartbeats,
                                                           const Clock& clock) {
  std::unique_ptr<Watchdog> watchdog(new Watchdog(std::move(options), heartbeats, clock));
  LOGPROBD_ASSIGN_OR_RETURN(
      watchdog->thread_, StartThread("watchdog", [watchdog = watchdog.get()] { watchdog->Run(); }));
  return watchdog;
}

Watchdog::Watchdog(Options options, const Heartbeats& heartbeats, const Clock& clock)
    : options_(std::move(options)), heartbeats_(heartbeats), clock_(clock) {}

Watchdog::~Watchdog() {
  {
    const absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void Watchdog::Run() {
  HangMeter meter(kInterval);
  absl::Time next_ping = clock_.Now();
  while (true) {
    const absl::Time now = clock_.Now();
    const std::vector<HungThread> still = meter.Look(now, heartbeats_.All());
    const auto count = std::count_if(still.begin(), still.end(), [this](const HungThread& each) {
      return each.time > options_.still_max;
    });
    if (count > 0) {
      options_.on_hang(absl::MakeConstSpan(still).first(static_cast<size_t>(count)));
      return;
    }
    if (now >= next_ping && options_.ping_interval != absl::InfiniteDuration() &&
        (still.empty() || still.front().time <= options_.ping_interval)) {
      options_.ping();
      next_ping = now + options_.ping_interval;
    }
    const absl::MutexLock lock(&mutex_);
    if (clock_.AwaitUntil(mutex_, absl::Condition(&is_stopping_), now + kInterval)) return;
  }
}

std::string DescribeHang(const HungThread& hung) {
  const Heartbeat::Owner& owner = hung.heartbeat->owner();
  const int32_t shard = hung.heartbeat->shard();
  return absl::StrCat("thread ", owner.thread,
                      owner.head.empty() ? "" : absl::StrCat(", head ", owner.head),
                      owner.replica < 0 ? "" : absl::StrCat(", replica ", owner.replica),
                      shard < 0 ? "" : absl::StrCat(", shard ", shard), " has not moved for ",
                      absl::ToInt64Seconds(hung.time), " s");
}

}  // namespace logprobd
