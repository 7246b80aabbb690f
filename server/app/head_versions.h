#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/app/load_ticker.h"
#include "server/app/load_turn.h"
#include "server/app/local_head.h"
#include "server/app/version_engines.h"
#include "server/app/version_loader.h"
#include "server/base/weight_store.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// The versions of one head's weights, changed while it serves: the part of WeightStore that is one
/// head's. The live one is in the LocalHead; at most one other is in memory beside it, staged or
/// kept for Rollback.
///
/// Thread-safe. One change at a time; another one meanwhile is ABORTED. Whatever fails before a
/// commit leaves the live version, and what is staged, as it was.
class HeadVersions {
 public:
  struct Options {
    std::string source;  ///< Path that the version was loaded from which is live at first.
    /// Shared with all loads of the server. Must outlive it.
    LoadTurn* load_turn = nullptr;
    /// Called after the versions or their memory have changed, under no lock; may be empty.
    std::function<void()> on_change;
  };

  /// `loader`: of this head. `head` and `metrics` must outlive it.
  HeadVersions(LocalHead& head, VersionLoader loader, Options options, Metrics& metrics);
  ~HeadVersions();

  // As in WeightStore, for this head; further errors:
  //   FAILED_PRECONDITION  another version is staged: commit or discard it first.
  //   UNAVAILABLE          shutting down.

  /// Waits ("checking") while weights of another head are loaded.
  absl::StatusOr<WeightsVersion> Load(const WeightsLoad& load,
                                      const LoadTicker::Progress& progress);
  absl::StatusOr<HeadWeightsState> Commit(uint64_t version);
  absl::StatusOr<HeadWeightsState> Rollback();
  absl::StatusOr<HeadWeightsState> Discard(bool staged, bool previous);
  /// Reads the whole weight of the version that was live at start the first time, for its sha256.
  HeadWeightsState List();

  /// Ends what runs soon (UNAVAILABLE) and refuses all from now on.
  void Stop() { is_stopped_ = true; }

  /// Of the versions beside the live one.
  MemoryPlan memory() const;

  std::string name() const { return head_.info()->name; }

 private:
  class Change;

  /// What is to become a version.
  struct Planned {
    VersionLoader::Candidate candidate;
    EnginePlan plan;  ///< Fits once what goes first is gone.
  };

  absl::StatusOr<WeightsVersion> LoadAlone(const WeightsLoad& load, LoadTicker& ticker);
  absl::StatusOr<uint64_t> NumberOf(const WeightsLoad& load) const;
  absl::StatusOr<LoadTurn::Holder> AwaitTurn(LoadTicker& ticker) const;
  absl::StatusOr<EnginePlan> Plan(const HeadInfo& found, bool in_place) const;
  MemoryPlan MemoryThatGoes(bool in_place) const;
  absl::StatusOr<std::unique_ptr<VersionEngines>> Make(const Planned& planned,
                                                       LoadTicker& ticker) const;
  absl::StatusOr<WeightsVersion> Stage(const Planned& planned, LoadTicker& ticker);
  absl::StatusOr<WeightsVersion> ReplaceInPlace(const Planned& planned, LoadTicker& ticker);
  void Restore(const VersionEngines& old, const WeightsVersion& facts);
  void MakeLive(std::unique_ptr<VersionEngines> next, bool keeps_previous);
  void DropPrevious();
  HeadWeightsState State() const;
  void NotifyChange() const;

  LocalHead& head_;
  const VersionLoader loader_;
  const Options options_;
  Metrics& metrics_;
  std::atomic<bool> is_stopped_ = false;
  std::atomic<bool> is_changing_ = false;
  absl::Mutex list_mutex_;  // one List at a time reads the weight

  mutable absl::Mutex mutex_;
  WeightsVersion live_ ABSL_GUARDED_BY(mutex_);  // version 0: none is
  std::unique_ptr<VersionEngines> staged_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<VersionEngines> previous_ ABSL_GUARDED_BY(mutex_);
  uint64_t highest_version_ ABSL_GUARDED_BY(mutex_) = 0;  // that it has ever had
  /// The first version's, which was not checked when it was loaded; `unread_` until it is known.
  std::string first_sha256_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const HeadWeights> unread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
