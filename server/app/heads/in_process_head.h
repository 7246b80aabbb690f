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
#include "server/app/heads/version_loader.h"
#include "server/base/clock.h"
#include "server/base/scoring_engine.h"
#include "server/base/served_head.h"
#include "server/batching/batcher.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A head that this process serves: the live version of its weights, its batcher and Verify.
class InProcessHead final : public ServedHead {
 public:
  /// Time in which the batches of a version that is no longer live usually end. A batch takes
  /// milliseconds, or seconds on a CPU.
  static constexpr absl::Duration kRetireTimeMax = absl::Seconds(30);

  /// Makes a head that is ready at once. `info` describes the weight; its engine, engine_reason and
  /// limits are filled in. `replicas` holds one engine per replica. Returns the errors of
  /// Batcher::Create. `clock` and `metrics` must outlive the head.
  static absl::StatusOr<std::shared_ptr<InProcessHead>> Create(
      HeadInfo info, std::unique_ptr<const HeadWeights> weights,
      std::vector<std::unique_ptr<ScoringEngine>> replicas, const Batcher::Options& options,
      const Clock& clock, Metrics& metrics);

  /// Ends a running Verify (CANCELLED), answers queued requests (UNAVAILABLE), joins all threads.
  ~InProcessHead() override;

  std::shared_ptr<const HeadInfo> info() const override;
  bool ready() const override;
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done) override;
  void Cancel(RequestTicket ticket) override { batcher_->Cancel(ticket); }
  void Verify(const VerifyOptions& options, VerifyCallback done) override;

  /// Returns false once every replica has failed; only a restart of the process repairs that.
  bool healthy() const { return num_healthy() > 0; }

  int num_replicas() const;
  /// Returns the number of replicas that have not failed; all of them while no version is live.
  int num_healthy() const;
  /// `replica` counts from 0 in the order of Create.
  bool is_replica_healthy(int replica) const;

  // Another version is made live in two steps, by one thread at a time. The caller may give up
  // rights that it holds if AwaitRetired returns false.

  /// Makes `next` live between two batches; see Batcher::Commit. If `next` is null, no version is
  /// live and requests wait. EndCommit must follow.
  void BeginCommit(std::unique_ptr<VersionEngines> next);
  /// Waits until the last batch of the version that was live has ended, for at most
  /// kRetireTimeMax. Returns whether it has.
  bool AwaitRetired();
  /// Waits for that end, however long, and returns the version that was live, or null.
  std::unique_ptr<VersionEngines> EndCommit();
  /// Does both steps.
  std::unique_ptr<VersionEngines> Commit(std::unique_ptr<VersionEngines> next);

  /// Reports, after Commit(nullptr), that no version is available. Until the next Commit the head
  /// is not ready, and waiting and new requests get UNAVAILABLE with `reason`.
  void Fail(const std::string& reason);
  /// Answers all requests with `why`; see Batcher::Abandon.
  void Abandon(const absl::Status& why) { batcher_->Abandon(why); }
  /// Returns the reason given to Fail; empty while a version is live or about to become live.
  std::string failure() const;

  /// Publishes `limits`, checks new requests against them, and applies the queue limits of
  /// `options`; see Batcher::SetLimits.
  absl::Status SetLimits(const Batcher::Options& options, const RequestLimits& limits);

  /// Makes the head not ready, drains the batcher (see Batcher::Drain), then ends a running Verify.
  bool Drain(absl::Time deadline);

  /// Returns the weights of the live version, or null.
  std::shared_ptr<const HeadWeights> weights() const;

  /// Returns the memory of the live version: weights, workspace and staging of all replicas, with
  /// one entry per place and kind.
  MemoryPlan memory() const;

 private:
  InProcessHead(std::unique_ptr<VersionEngines> live, const Clock& clock);

  /// `options.stop` must be set.
  absl::StatusOr<VerifyReport> RunVerify(const VerifyOptions& options);
  /// Requests a running Verify to end.
  void StopVerify();
  /// Publishes `info` with the limits in force. Requests keep the info that they began with.
  void PublishLocked(const HeadInfo& info) ABSL_EXCLUSIVE_LOCKS_REQUIRED(version_mutex_);

  const Clock& clock_;
  /// Locked before the Batcher's mutex, so that info() is never older than the version that scores.
  mutable absl::Mutex version_mutex_;
  std::unique_ptr<VersionEngines> live_ ABSL_GUARDED_BY(version_mutex_);
  std::unique_ptr<VersionEngines> retiring_;  ///< Between BeginCommit and EndCommit.
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
