#include "server/app/heads/version_releaser.h"

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/app/heads/plan.h"
#include "server/base/host.h"
#include "server/base/log.h"

namespace logprobd {

void VersionReleaser::Join(std::list<Releasing>& releasing) {
  for (Releasing& each : releasing) {
    if (each.thread.joinable()) each.thread.join();
  }
}

VersionReleaser::~VersionReleaser() {
  std::list<Releasing> all;
  {
    const absl::MutexLock lock(&mutex_);
    all.swap(releasing_);
  }
  Join(all);
}

bool VersionReleaser::Release(std::unique_ptr<VersionEngines> version) {
  if (version == nullptr) return true;
  EraseDone();
  const uint64_t number = version->version.version;
  const std::string head = version->info->name;
  Releasing* releasing = nullptr;
  {
    const absl::MutexLock lock(&mutex_);
    releasing = &releasing_.emplace_back();
    releasing->memory = version->memory();
  }
  absl::StatusOr<std::thread> started =
      StartThread("release", [this, releasing, owned = std::move(version)]() mutable {
        owned = nullptr;
        const absl::MutexLock lock(&mutex_);
        releasing->is_done = true;
      });
  bool is_done = false;
  {
    const absl::MutexLock lock(&mutex_);
    if (started.ok()) {
      releasing->thread = *std::move(started);
      clock_.AwaitUntil(mutex_, absl::Condition(&releasing->is_done), clock_.Now() + kWaitMax);
    } else {
      releasing->is_done = true;  // the version was destroyed with the thread's function
    }
    is_done = releasing->is_done;
  }
  EraseDone();
  if (!is_done) {
    LogError("a version is dropped, but its memory stays in use: a replica does not end its work",
             {{"head", head}, {"version", number}});
  }
  return is_done;
}

MemoryPlan VersionReleaser::memory() const {
  MemoryPlan plan;
  const absl::MutexLock lock(&mutex_);
  for (const Releasing& each : releasing_) {
    if (!each.is_done) AddMemory(plan, each.memory);
  }
  return plan;
}

void VersionReleaser::EraseDone() {
  std::list<Releasing> done;
  {
    const absl::MutexLock lock(&mutex_);
    for (auto each = releasing_.begin(); each != releasing_.end();) {
      const auto next = std::next(each);
      if (each->is_done) done.splice(done.end(), releasing_, each);
      each = next;
    }
  }
  Join(done);
}

}  // namespace logprobd
