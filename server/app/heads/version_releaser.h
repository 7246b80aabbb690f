#pragma once

#include <list>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/app/heads/version_loader.h"
#include "server/base/clock.h"
#include "server/base/scoring_engine.h"

namespace logprobd {

/// Destroys versions of a head, each on a thread of its own: the destructor of an engine waits for
/// the work of its devices, which never ends if one of them hangs.
class VersionReleaser {
 public:
  /// Longest time for which Release waits. Freeing the memory of a version takes about a second.
  static constexpr absl::Duration kWaitMax = absl::Seconds(30);

  /// `clock` must outlive the object.
  explicit VersionReleaser(const Clock& clock) : clock_(clock) {}
  /// Waits for all versions.
  ~VersionReleaser();

  /// Destroys `version`, which may be null, and waits for that, but at most kWaitMax. Returns
  /// whether it is destroyed, so that its memory is free; otherwise this is logged. Must be called
  /// from one thread at a time.
  bool Release(std::unique_ptr<VersionEngines> version);

  /// Returns the memory of the versions that are not destroyed yet. Any thread.
  MemoryPlan memory() const;

 private:
  struct Releasing {
    MemoryPlan memory;
    bool is_done = false;
    std::thread thread;
  };

  static void Join(std::list<Releasing>& releasing);
  void EraseDone();

  const Clock& clock_;
  mutable absl::Mutex mutex_;
  std::list<Releasing> releasing_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
