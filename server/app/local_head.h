#pragma once

#include <atomic>
#include <memory>
#include <thread>

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

/// A head served by this process: its weight (kept open for Verify), engine and batcher.
class LocalHead final : public ServedHead {
 public:
  /// Ready from the start. `info` is the weight's with the engine's name, reason and the limits
  /// filled in. Errors are those of Batcher::Create; `clock` and `metrics` must outlive the head.
  static absl::StatusOr<std::shared_ptr<LocalHead>> Create(
      HeadInfo info, std::unique_ptr<const HeadWeights> weights,
      std::unique_ptr<ScoringEngine> engine, const Batcher::Options& options, const Clock& clock,
      Metrics& metrics);

  /// Ends a running Verify (CANCELLED), answers what is queued (UNAVAILABLE), joins all threads.
  ~LocalHead() override;

  const HeadInfo& info() const override { return info_; }
  bool ready() const override;
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done) override;
  void Cancel(RequestTicket ticket) override { batcher_->Cancel(ticket); }
  void Verify(const VerifyOptions& options, VerifyCallback done) override;

  /// False once the engine has failed: the process must be restarted.
  bool healthy() const { return engine_->healthy(); }

  /// Not ready from now on; see Batcher::Drain. Then ends a running Verify.
  bool Drain(absl::Time deadline);

  /// Weights, workspace and staging.
  MemoryPlan memory() const;

 private:
  LocalHead(HeadInfo info, std::unique_ptr<const HeadWeights> weights,
            std::unique_ptr<ScoringEngine> engine, const Clock& clock)
      : info_(std::move(info)),
        weights_(std::move(weights)),
        engine_(std::move(engine)),
        clock_(clock) {}

  /// `options.stop` is set.
  absl::StatusOr<VerifyReport> RunVerify(const VerifyOptions& options);
  /// Ends a running Verify soon.
  void StopVerify();

  const HeadInfo info_;
  const std::unique_ptr<const HeadWeights> weights_;
  const std::unique_ptr<ScoringEngine> engine_;
  const Clock& clock_;
  std::unique_ptr<Batcher> batcher_;
  std::atomic<bool> is_draining_ = false;
  absl::Mutex verify_mutex_;
  bool is_verifying_ ABSL_GUARDED_BY(verify_mutex_) = false;
  std::shared_ptr<std::atomic<bool>> verify_stop_ ABSL_GUARDED_BY(verify_mutex_);
  std::thread verify_thread_ ABSL_GUARDED_BY(verify_mutex_);
};

}  // namespace logprobd
