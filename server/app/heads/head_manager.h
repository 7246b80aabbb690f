#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/app/heads/head_versions.h"
#include "server/app/heads/in_process_head.h"
#include "server/app/heads/load_control.h"
#include "server/app/heads/plan.h"
#include "server/base/clock.h"
#include "server/batching/batcher.h"
#include "server/batching/device_turns.h"
#include "server/batching/version_replicas.h"
#include "server/http/status_page.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// Manages one of the server's heads from its plan to its end: loads it, watches its replicas,
/// applies limits and drains it. Load and Watch must be called from one thread; all other functions
/// may be called from any thread.
class HeadManager {
 public:
  /// The objects through which the head takes turns with the other heads of the server.
  struct Turns {
    DeviceTurns* devices = nullptr;  ///< Null if the head shares no device.
    int head = 0;                    ///< Index of the head in `devices`.
    LoadTurn* load = nullptr;        ///< Never null.
  };

  /// `options` are those of this head alone. `roots` are the folders from which new weights may be
  /// loaded; null if loading is off. `parts`, `metrics` and the objects that `turns` points to must
  /// outlive the manager.
  HeadManager(ServerOptions options, ServingPlan plan, std::unique_ptr<HeadWeights> weights,
              std::shared_ptr<const AllowedRoots> roots, Turns turns, const ServerParts& parts,
              Metrics& metrics);

  /// Reads the weight and creates the engines and the queue. The caller holds the turn to load.
  /// Returns CANCELLED once `stop` is set. Later, `on_change` is called whenever the live version
  /// of the weights or the memory in plan() has changed.
  absl::Status Load(const std::atomic<bool>& stop,
                    const std::function<void(int64_t done_bytes, int64_t total_bytes)>& progress,
                    std::function<void()> on_change);

  const std::string& name() const { return options_.head_name; }
  /// Returns null until the head is loaded.
  std::shared_ptr<InProcessHead> head() const;
  /// Returns null until the head is loaded.
  std::shared_ptr<HeadVersions> versions() const;
  /// Returns the plan of the head. Its memory is the planned memory until the head is loaded, and
  /// then the memory in use.
  ServingPlan plan() const;

  /// Returns whether the head is loaded, a replica is healthy, and a version of the weights is live
  /// or about to be.
  bool is_ready() const;
  /// Returns whether a replica has failed or a dropped version is not destroyed yet. Its device may
  /// hang and thereby block the destructor.
  bool may_hang() const;
  /// Returns "the engine has failed" or "1 of 2 replicas has failed", or an empty string if nothing
  /// has failed.
  std::string FailureText() const;

  /// Returns state, replicas and limits for the status page; the load figures are left at 0.
  HeadStatus Status() const;

  /// Publishes and logs the replicas that have failed since the last call, and drops pushed rows
  /// that were abandoned. Returns whether a
  /// healthy replica is left. If `is_only`, the loss of a single replica is not logged, because it
  /// ends the server.
  bool Watch(bool is_only);

  /// Applies the limits of `options`, which are those of this head alone; see
  /// InProcessHead::SetLimits. The head must be loaded.
  absl::Status SetLimits(const ServerOptions& options);

  /// Makes the head not ready. Returns true if all work was finished by `deadline`, or if the head
  /// is not loaded.
  bool Drain(absl::Time deadline);

  /// Answers all requests with `why`, if the head is loaded; see Batcher::Abandon.
  void Abandon(const absl::Status& why);

 private:
  Batcher::Options BatcherOptions(const ServerOptions& options);
  std::shared_ptr<HeadVersions> MakeVersions(InProcessHead& head,
                                             const EngineOptions& engine_options,
                                             std::function<void()> on_change);
  absl::Status ReserveStaging(const std::vector<std::unique_ptr<ScoringEngine>>& engines);
  /// Returns the memory in use, including spare staging that belongs to no version.
  MemoryPlan MemoryOf(const InProcessHead& head, const HeadVersions& versions) const;
  /// Updates the plan with the live version and the memory in use.
  void UpdatePlan();

  const ServerOptions options_;
  const Turns turns_;
  const ServerParts& parts_;
  Metrics& metrics_;
  std::unique_ptr<HeadWeights> weights_;  // null once the head is loaded
  std::vector<bool> is_loss_logged_;      // [num_replicas]; used by Watch
  bool is_end_logged_ = false;            // used by Watch
  bool was_ready_ = true;                 // used by Watch
  const std::shared_ptr<const AllowedRoots> roots_;
  StagingStore staging_;  // shared by all versions, which are destroyed before it

  mutable absl::Mutex mutex_;
  ServingPlan plan_ ABSL_GUARDED_BY(mutex_);
  int64_t queue_rows_max_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<InProcessHead> head_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<HeadVersions> versions_ ABSL_GUARDED_BY(mutex_);  // destroyed before `head_`
};

}  // namespace logprobd
