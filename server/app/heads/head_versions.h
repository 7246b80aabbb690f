#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/app/heads/in_process_head.h"
#include "server/app/heads/load_control.h"
#include "server/app/heads/pending_push.h"
#include "server/app/heads/version_loader.h"
#include "server/app/heads/version_numbers.h"
#include "server/app/heads/version_releaser.h"
#include "server/base/clock.h"
#include "server/base/weight_store.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"
#include "server/weights/pushed_weights.h"

namespace logprobd {

/// Changes the weights of one head while it serves requests. It has the functions of WeightStore
/// for a single head. The InProcessHead holds the live version. At most one other version is in
/// memory: a staged one, or the previous one, which is kept for Rollback.
///
/// Thread-safe. Only one change runs at a time; a second change returns ABORTED. A failure before a
/// commit leaves the live version and the staged version unchanged.
class HeadVersions {
 public:
  struct Options {
    std::string source;  ///< Path from which the first live version was loaded.
    /// Shared by all loads of the server. Must outlive the HeadVersions.
    LoadTurn* load_turn = nullptr;
    /// Called without locks after the versions or their memory have changed; may be empty.
    std::function<void()> on_change;
    /// Time after which DropIdlePush drops rows that no call adds to; > 0.
    absl::Duration push_idle_max = absl::InfiniteDuration();
    const Clock* clock = &Clock::Steady();  ///< For push_idle_max and VersionReleaser.
  };

  /// `loader` creates versions of this head. `head` and `metrics` must outlive the HeadVersions.
  HeadVersions(InProcessHead& head, VersionLoader loader, Options options, Metrics& metrics);
  ~HeadVersions();

  // These are the calls of WeightStore for this head. Additional errors:
  //   FAILED_PRECONDITION  another version is staged: commit or discard it first.
  //   UNAVAILABLE          the server is shutting down, or a version that must be dropped first has
  //                        a replica that does not end its work.

  /// Waits in the phase "checking" while weights of another head are loaded.
  absl::StatusOr<WeightsVersion> Load(const WeightsLoad& load,
                                      const LoadTicker::Progress& progress);
  /// The rows of a failed push stay for the next one, unless the version can never be staged. Waits
  /// while weights of another head are loaded before it takes memory, and while another call stages
  /// the same version.
  absl::StatusOr<PushedWeightsResult> Push(const WeightsPush& push, const NextPushedRows& next,
                                           const LoadTicker::Progress& progress);
  absl::StatusOr<HeadWeightsState> Commit(uint64_t version);
  absl::StatusOr<HeadWeightsState> Rollback();
  absl::StatusOr<HeadWeightsState> Discard(bool staged, bool previous);
  /// The first call that needs the sha256 of the version that was live at the start reads that
  /// whole weight.
  HeadWeightsState List();

  /// Drops rows to which no call has added for Options::push_idle_max. Must be called from time to
  /// time.
  void DropIdlePush();

  /// Makes running calls end soon with UNAVAILABLE, and refuses all later ones.
  void Stop() { is_stopped_ = true; }

  /// Returns the memory of all versions except the live one, also of those that are being dropped.
  MemoryPlan memory() const;

  /// Returns whether a dropped version is not destroyed yet. The destructor waits for it.
  bool is_releasing() const { return !releaser_.memory().empty(); }

  std::string name() const { return head_.info()->name; }

 private:
  class Change;

  /// A candidate that has passed the checks.
  struct Planned {
    VersionLoader::Candidate candidate;
    EnginePlan plan;  ///< Fits into memory once that of MemoryToFree is released.
  };

  /// What is needed to load a version again whose engines have been freed.
  struct Freed {
    std::shared_ptr<const HeadWeights> weights;
    EnginePlan plan;
    WeightsVersion version;
  };

  /// Finds the candidate that becomes version `number`.
  using OpenCandidate = std::function<absl::StatusOr<VersionLoader::Candidate>(uint64_t number)>;

  /// The version to which a call of Push belongs.
  struct JoinedPush {
    std::shared_ptr<PendingPush::Version> pending;     ///< The call adds its rows to it.
    std::shared_ptr<const PushedWeights> staged_rows;  ///< Or the call compares them with these,
    WeightsVersion staged;                             ///< the rows of this version.
  };

  /// Loads the candidate that `open` returns.
  absl::StatusOr<WeightsVersion> LoadAs(const WeightsLoad& load, const OpenCandidate& open,
                                        const LoadTicker::Progress& progress);
  absl::StatusOr<WeightsVersion> LoadCandidate(const WeightsLoad& load,
                                               VersionLoader::Candidate candidate,
                                               LoadTicker& ticker);
  /// Counts a load that failed. The line about it is that of the audit, which names its caller too.
  void RecordFailure(const absl::Status& status);
  /// Finds or begins the version of `push`. A number that can never be that of its rows is refused
  /// here, before any of them is received.
  absl::StatusOr<JoinedPush> JoinPush(const WeightsPush& push, const HeadInfo& info,
                                      LoadTicker& ticker);
  /// Takes the memory of a version that a call has begun. The turn keeps the memory that the check
  /// finds free from loads and other pushes until it is taken.
  absl::Status OpenPush(const std::shared_ptr<PendingPush::Version>& version, const HeadInfo& info,
                        LoadTicker& ticker);
  absl::StatusOr<WeightsVersion> StagePushed(const std::shared_ptr<PendingPush::Version>& version,
                                             const LoadTicker::Progress& progress);
  /// Logs and counts rows that were dropped before they were staged, and frees them. `dropped` may
  /// be null.
  void RecordDropped(std::shared_ptr<const PendingPush::Version> dropped, absl::string_view reason);
  /// Returns the number of the next version, or FAILED_PRECONDITION while one is staged.
  absl::StatusOr<uint64_t> NumberOf(uint64_t requested) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckIsFree(uint64_t number) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<LoadTurn::Holder> AwaitTurn(LoadTicker& ticker) const;
  absl::StatusOr<EnginePlan> Plan(const HeadInfo& found, bool in_place,
                                  const MemoryPlan& freed) const;
  /// Returns the memory that a load frees before it takes memory itself.
  MemoryPlan MemoryToFree(bool in_place) const;
  absl::StatusOr<std::unique_ptr<VersionEngines>> Make(const Planned& planned,
                                                       LoadTicker& ticker) const;
  absl::StatusOr<WeightsVersion> Stage(const Planned& planned, LoadTicker& ticker);
  /// Replaces the live version: no version is live from the moment at which the old one is taken
  /// out until the new one is made, because memory has room for one. `turn` must be held.
  absl::StatusOr<WeightsVersion> ReplaceInPlace(Planned planned,
                                                std::optional<LoadTurn::Holder> turn,
                                                LoadTicker& ticker);
  /// Loads the freed version again, whose files are still open. If there was none, or it cannot be
  /// loaded, no version is live and the head says so.
  void Restore(const std::optional<Freed>& freed);
  void MakeLive(std::unique_ptr<VersionEngines> next, bool keeps_previous);
  absl::Status DropPrevious();
  HeadWeightsState State() const;
  void NotifyChange() const;

  InProcessHead& head_;
  const VersionLoader loader_;
  const Options options_;
  Metrics& metrics_;
  std::atomic<bool> is_stopped_ = false;
  std::atomic<bool> is_changing_ = false;
  VersionReleaser releaser_;
  absl::Mutex list_mutex_;  // only one List at a time reads the weight

  mutable absl::Mutex mutex_;
  WeightsVersion live_ ABSL_GUARDED_BY(mutex_);  // its number is 0 while no version is live
  std::unique_ptr<VersionEngines> staged_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<VersionEngines> previous_ ABSL_GUARDED_BY(mutex_);
  PendingPush push_ ABSL_GUARDED_BY(mutex_);
  VersionNumbers numbers_ ABSL_GUARDED_BY(mutex_);
  /// The weights of the first version, until their digest is known.
  std::shared_ptr<const HeadWeights> unread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
