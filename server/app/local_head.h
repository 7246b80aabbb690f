#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/app/version_engines.h"
#include "server/base/clock.h"
#include "server/base/scoring_engine.h"
#include "server/base/served_head.h"
#include "server/batching/batcher.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A head served by this process: the live version of its weights and its batcher.
class LocalHead final : public ServedHead {
 public:
  /// Ready from the start. `info` is the weight's with the engines' name, reason and the limits
  /// filled in. `replicas`: an engine each. Errors are those of Batcher::Create; `clock` and
  /// `metrics` must outlive the head.
  static absl::StatusOr<std::shared_ptr<LocalHead>> Create(
      HeadInfo info, std::unique_ptr<const HeadWeights> weights,
      std::vector<std::unique_ptr<ScoringEngine>> replicas, const Batcher::Options& options,
      const Clock& clock, Metrics& metrics);

  /// Ends a running Verify (CANCELLED), answers what is queued (UNAVAILABLE), joins all threads.
  ~LocalHead() override;

  std::shared_ptr<const HeadInfo> info() const override;
  bool ready() const override;
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done) override;
  void Cancel(RequestTicket ticket) override { batcher_->Cancel(ticket); }
  void Verify(const VerifyOptions& options, VerifyCallback done) override;

  /// False once every replica has failed: the process must be restarted.
  bool healthy() const { return num_healthy() > 0; }

  int num_replicas() const;
  /// Replicas that have not failed; all of them while no version is live.
  int num_healthy() const;
  /// `replica`: from 0, as in Create.
  bool is_replica_healthy(int replica) const;

  /// Makes `next` live between two batches; see Batcher::Commit. Returns the version that was live,
  /// which nothing uses any more, or null. Null makes none live: requests wait. From one thread at
  /// a time.
  std::unique_ptr<VersionEngines> Commit(std::unique_ptr<VersionEngines> next);
  /// After Commit(nullptr), when no version can be had: not ready until the next Commit; what waits
  /// and comes is UNAVAILABLE with this reason.
  void Fail(const std::string& reason);
  /// The reason of Fail; empty while a version is live or about to be.
  std::string failure() const;

  /// Publishes `limits` and holds requests from now on to them, and the queue to those of
  /// `options`; see Batcher::SetLimits.
  absl::Status SetLimits(const Batcher::Options& options, const RequestLimits& limits);

  /// Not ready from now on; see Batcher::Drain. Then ends a running Verify.
  bool Drain(absl::Time deadline);

  /// Of the live version, or null.
  std::shared_ptr<const HeadWeights> weights() const;

  /// Of the live version: weights, workspace and staging of all replicas; an entry for each place
  /// and kind.
  MemoryPlan memory() const;

 private:
  LocalHead(std::unique_ptr<VersionEngines> live, const Clock& clock);

  /// `options.stop` is set.
  absl::StatusOr<VerifyReport> RunVerify(const VerifyOptions& options);
  /// Ends a running Verify soon.
  void StopVerify();
  void PublishLocked(const HeadInfo& info) ABSL_EXCLUSIVE_LOCKS_REQUIRED(version_mutex_);

  const Clock& clock_;
  /// Taken before the Batcher's, so that info() never lags behind what requests are scored with.
  mutable absl::Mutex version_mutex_;
  std::unique_ptr<VersionEngines> live_ ABSL_GUARDED_BY(version_mutex_);
  std::shared_ptr<const HeadInfo> info_ ABSL_GUARDED_BY(version_mutex_);
  RequestLimits limits_ ABSL_GUARDED_BY(version_mutex_);
  int num_replicas_ ABSL_GUARDED_BY(version_mutex_);  // of the last live version
  std::string failure_ ABSL_GUARDED_BY(version_mutex_);
  std::unique_ptr<Batcher> batcher_;
  std::atomic<bool> is_draining_ = false;
  absl::Mutex verify_mutex_;
  bool is_verifying_ ABSL_GUARDED_BY(verify_mutex_) = false;
  std::shared_ptr<std::atomic<bool>> verify_stop_ ABSL_GUARDED_BY(verify_mutex_);
  std::thread verify_thread_ ABSL_GUARDED_BY(verify_mutex_);
};

}  // namespace logprobd
