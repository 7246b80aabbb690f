#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/base/clock.h"
#include "server/base/scoring_engine.h"
#include "server/base/served_head.h"
#include "server/batching/batcher.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A head served by this process: its weight (kept open for Verify), engines and batcher.
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

  const HeadInfo& info() const override { return info_; }
  bool ready() const override;
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done) override;
  void Cancel(RequestTicket ticket) override { batcher_->Cancel(ticket); }
  void Verify(const VerifyOptions& options, VerifyCallback done) override;

  /// False once every replica has failed: the process must be restarted.
  bool healthy() const { return num_healthy() > 0; }

  int num_replicas() const { return static_cast<int>(replicas_.size()); }
  /// Replicas that have not failed.
  int num_healthy() const;
  /// `replica`: from 0, as in Create.
  bool is_replica_healthy(int replica) const {
    return replicas_[static_cast<size_t>(replica)]->healthy();
  }

  /// Not ready from now on; see Batcher::Drain. Then ends a running Verify.
  bool Drain(absl::Time deadline);

  /// Weights, workspace and staging of all replicas; an entry for each place and kind.
  MemoryPlan memory() const;

 private:
  LocalHead(HeadInfo info, std::unique_ptr<const HeadWeights> weights,
            std::vector<std::unique_ptr<ScoringEngine>> replicas, const Clock& clock)
      : info_(std::move(info)),
        weights_(std::move(weights)),
        replicas_(std::move(replicas)),
        clock_(clock) {}

  /// `options.stop` is set.
  absl::StatusOr<VerifyReport> RunVerify(const VerifyOptions& options);
  /// Ends a running Verify soon.
  void StopVerify();

  const HeadInfo info_;
  const std::unique_ptr<const HeadWeights> weights_;
  const std::vector<std::unique_ptr<ScoringEngine>> replicas_;
  const Clock& clock_;
  std::unique_ptr<Batcher> batcher_;
  std::atomic<bool> is_draining_ = false;
  absl::Mutex verify_mutex_;
  bool is_verifying_ ABSL_GUARDED_BY(verify_mutex_) = false;
  std::shared_ptr<std::atomic<bool>> verify_stop_ ABSL_GUARDED_BY(verify_mutex_);
  std::thread verify_thread_ ABSL_GUARDED_BY(verify_mutex_);
};

}  // namespace logprobd
