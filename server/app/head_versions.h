#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/app/head_version.h"
#include "server/app/local_head.h"
#include "server/base/clock.h"
#include "server/base/weight_store.h"
#include "server/engine/engines.h"
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
  /// What versions are made with, so that tests can put in their own.
  struct Parts {
    std::function<absl::StatusOr<ModelFolderHead>(const std::string& path,
                                                  const ModelFolderOptions& options)>
        open_model;
    std::function<absl::StatusOr<EnginePlan>(const HeadInfo& head, const EngineOptions& options)>
        plan_engine;
    std::function<absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>>(
        const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options)>
        create_engines;
    std::function<absl::StatusOr<int64_t>()> available_host_bytes;
    const Clock* clock = &Clock::Steady();
  };

  struct Options {
    /// As at start; `roots` null: nothing may be loaded.
    ModelFolderOptions model;
    EngineOptions engine;      ///< As at start.
    Batcher::Options batcher;  ///< As the head's.
    EnginePlan plan;           ///< Of the version that is live at first: others lie as it does.
    std::string source;        ///< Path that this version was loaded from.
    /// Called after the versions or their memory have changed, under no lock; may be empty.
    std::function<void()> on_change;
  };

  /// `head` and `metrics` must outlive it.
  HeadVersions(LocalHead& head, Options options, Parts parts, Metrics& metrics);
  ~HeadVersions();

  using Progress = std::function<bool(const WeightsProgress&)>;

  // As in WeightStore, for this head; further errors:
  //   FAILED_PRECONDITION  another version is staged: commit or discard it first.
  //   UNAVAILABLE          shutting down.

  absl::StatusOr<WeightsVersion> Load(const WeightsLoad& load, const Progress& progress);
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
  class Ticker;
  struct Candidate;
  class Change;

  absl::StatusOr<WeightsVersion> LoadAlone(const WeightsLoad& load, Ticker& ticker);
  absl::StatusOr<Candidate> Check(const WeightsLoad& load, Ticker& ticker);
  absl::StatusOr<uint64_t> NumberOf(const WeightsLoad& load) const;
  absl::Status CheckShape(const HeadInfo& found) const;
  absl::Status Plan(Candidate& candidate, bool in_place) const;
  absl::Status CheckHostMemory(const HeadInfo& found, const EnginePlan& plan, bool in_place) const;
  absl::StatusOr<std::unique_ptr<HeadVersion>> Make(
      const std::shared_ptr<const HeadWeights>& weights, const EnginePlan& plan, Ticker& ticker);
  absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateEngines(
      const HeadWeights& weights, const EnginePlan& plan, Ticker& ticker);
  absl::StatusOr<WeightsVersion> Stage(Candidate candidate, Ticker& ticker);
  absl::StatusOr<WeightsVersion> ReplaceInPlace(Candidate candidate, Ticker& ticker);
  void Restore(const HeadVersion& old, const WeightsVersion& facts);
  void MakeLive(std::unique_ptr<HeadVersion> next, bool keeps_previous);
  void DropPrevious();
  HeadWeightsState StateLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  HeadWeightsState State() const;
  void NotifyChange() const;

  LocalHead& head_;
  const Options options_;
  const EngineOptions engine_options_;  // with the layout of the plan
  const Parts parts_;
  Metrics& metrics_;
  std::atomic<bool> is_stopped_ = false;
  std::atomic<bool> is_changing_ = false;
  absl::Mutex list_mutex_;  // one List at a time reads the weight

  mutable absl::Mutex mutex_;
  WeightsVersion live_ ABSL_GUARDED_BY(mutex_);  // version 0: none is
  std::shared_ptr<const HeadWeights> unread_
      ABSL_GUARDED_BY(mutex_);  // of the first, no sha256 yet
  uint64_t unread_version_ ABSL_GUARDED_BY(mutex_) = 0;
  EnginePlan live_plan_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<HeadVersion> staged_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<HeadVersion> previous_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
