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
#include "server/app/head_versions.h"
#include "server/app/load_turn.h"
#include "server/app/local_head.h"
#include "server/app/plan_heads.h"
#include "server/app/status.h"
#include "server/base/clock.h"
#include "server/batching/batcher.h"
#include "server/batching/device_turns.h"
#include "server/batching/version_replicas.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// One of a server's heads, from its plan to its end: loads it, and tells when its replicas fail.
/// Load and Watch from one thread; the rest from any.
class HostedHead {
 public:
  /// What it takes turns for with the server's other heads.
  struct Turns {
    DeviceTurns* devices = nullptr;  ///< Null: it shares none.
    int head = 0;                    ///< Its number there.
    LoadTurn* load = nullptr;        ///< Not null.
  };

  /// `parts`, what `turns` points to and `metrics` must outlive it. `options`: of this head alone.
  /// `roots`: where new weights may be loaded from; null: nowhere.
  HostedHead(ServerOptions options, ServingPlan plan, std::unique_ptr<HeadWeights> weights,
             std::shared_ptr<const AllowedRoots> roots, Turns turns, const ServerParts& parts,
             Metrics& metrics);

  /// Reads the weight and makes engines and queue; the caller has the turn to load. CANCELLED once
  /// `stop` is set. `on_change` is called whenever plan() has changed since: another version of the
  /// weights, or its memory.
  absl::Status Load(const std::atomic<bool>& stop,
                    const std::function<void(int64_t done_bytes, int64_t total_bytes)>& progress,
                    std::function<void()> on_change);

  const std::string& name() const { return options_.head_name; }
  /// Null until it is loaded.
  std::shared_ptr<LocalHead> head() const;
  /// Null until it is loaded.
  std::shared_ptr<HeadVersions> versions() const;
  /// What it takes: as planned, and once it is loaded what was really reserved.
  ServingPlan plan() const;

  /// Loaded, a replica lives, and a version of the weights is live or about to be.
  bool is_ready() const;
  bool has_lost_replica() const;
  /// "the engine has failed", "1 of 2 replicas has failed"; empty: nothing has.
  std::string FailureText() const;

  /// What the status page says of it.
  HeadStatus Facts() const;

  /// Publishes and logs the replicas that have failed since the last call; whether a replica is
  /// left. With `is_only` nothing is logged of a single replica, whose loss ends the server.
  bool Watch(bool is_only);

  /// Takes over the limits of `options`, of this head alone; see LocalHead::SetLimits. Once it is
  /// loaded.
  absl::Status SetLimits(const ServerOptions& options);

  /// Not ready from now on; whether all work was finished by `deadline`; true when it is not
  /// loaded.
  bool Drain(absl::Time deadline);

 private:
  Batcher::Options BatcherOptions(const ServerOptions& options);
  std::shared_ptr<HeadVersions> MakeVersions(LocalHead& head, const EngineOptions& engine_options,
                                             std::function<void()> on_change);
  absl::Status ReserveStaging(const std::vector<std::unique_ptr<ScoringEngine>>& engines);
  MemoryPlan MemoryOf(const LocalHead& head, const HeadVersions& versions) const;
  void UpdatePlan();

  const ServerOptions options_;
  const Turns turns_;
  const ServerParts& parts_;
  Metrics& metrics_;
  std::unique_ptr<HeadWeights> weights_;  // until it is loaded
  std::vector<bool> is_loss_logged_;      // of Watch: [num_replicas]
  bool is_end_logged_ = false;            // of Watch
  bool was_ready_ = true;                 // of Watch
  const std::shared_ptr<const AllowedRoots> roots_;
  StagingStore staging_;  // of all versions, which go before it

  mutable absl::Mutex mutex_;
  ServingPlan plan_ ABSL_GUARDED_BY(mutex_);
  int64_t queue_rows_max_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<LocalHead> head_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<HeadVersions> versions_ ABSL_GUARDED_BY(mutex_);  // goes before `head_`
};

}  // namespace logprobd
