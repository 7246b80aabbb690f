#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/batching/admission.h"
#include "server/batching/batcher.h"
#include "server/batching/head_turns.h"
#include "server/batching/hidden_rows.h"
#include "server/batching/pending_request.h"
#include "server/batching/row_queue.h"
#include "server/batching/task_pool.h"
#include "server/batching/version_replicas.h"
#include "server/batching/version_switch.h"

namespace logprobd {

/// The Batcher's state and threads. batcher.cc contains the functions for callers' threads,
/// batcher_thread.cc the loop of the batch thread, and batcher_done.cc the end of batches and
/// requests.
///
/// One mutex guards everything except the batches. It is never held while a callback, the start of
/// a batch, the metrics or a copy runs. Callbacks run on the batch thread, an engine's thread or a
/// thread of the answer pool, never inside Submit or Cancel.
struct Batcher::Impl {
  Impl(const Options& options, VersionReplicas& first, const Clock& clock, Metrics& metrics);

  absl::Status Start();
  void Stop();
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done);
  void Cancel(RequestTicket ticket);
  void SetLimits(const Options& options);
  void Commit(VersionReplicas* next);
  bool AwaitRetired(absl::Time until);
  void Fail(const absl::Status& why);
  void Abandon(const absl::Status& why);
  bool Drain(absl::Time deadline);
  MemoryPlan memory() const;

 private:
  using Pending = std::shared_ptr<PendingRequest>;
  using Slot = VersionReplicas::Slot;
  using SlotState = VersionReplicas::SlotState;

  /// A request that has left the maps and whose callback is about to be called.
  struct Ending {
    Pending pending;
    absl::Status status;  ///< If OK, `pending->result` is complete.
    /// The request's rows. They are freed outside the mutex and stay charged until then.
    HiddenPayload payload;
  };

  /// Gives the batch thread something to do. If it does not come to it, its heartbeat shows that.
  void WakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    wake_ = true;
    heartbeat_->Begin();
  }

  // Functions that run on callers' threads (batcher.cc).
  static absl::Status EngineFailed();
  absl::Status CheckServingLocked(const ScoreRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AdmitLocked(const Pending& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckDeadlineLocked(const PendingRequest& pending, absl::Time now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Functions that run on the batch thread (batcher_thread.cc). Functions that unlock the mutex
  // lock it again before they return.
  void Run();
  /// Busy-polls for at most busy_poll, then sleeps, until there is something to do or wake_time_ is
  /// reached.
  void AwaitWakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool DoNextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status DeadlinePassed(const PendingRequest& pending);
  void ExpireDeadlinesLocked(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Ends the waiting requests that no engine will score: all of them when the Batcher stops, and
  /// those of a version that has no healthy replica.
  void EndUnservableLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndQueuedLocked(RowQueue& queue, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerEndingsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool LaunchNextLocked(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Launches the next batch of `version` if this head gets a turn on the shared devices; otherwise
  /// the head waits for one. A turn is taken before the batch is cut and given back when its engine
  /// is done. Returns whether anything was done.
  bool LaunchInTurnLocked(VersionReplicas& version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Ends the wait for a turn when there is nothing to launch. Returns whether the head waited.
  bool WithdrawLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LaunchLocked(Slot& slot, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Ends the reads of the payloads that have been copied. Returns false if no request of the batch
  /// needs its scores any more.
  bool FinishGatherLocked(Slot& slot, std::vector<HiddenPayload>& payloads)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropBatchLocked(Slot& slot, std::vector<HiddenPayload> payloads)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RelaunchLocked(Slot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool PublishGaugesLocked(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time NextWakeLocked(absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FillBatch(Slot& slot, std::vector<BatchPart> parts);
  void StartBatch(Slot& slot) ABSL_LOCKS_EXCLUDED(mutex_);

  // Functions that end batches and requests, on an engine's thread or the batch thread
  // (batcher_done.cc).
  void OnBatchDone(Slot& slot, const absl::Status& engine_status);
  void RecordEngineStages(const ScoreBatch& batch);
  void EndBatchLocked(Slot& slot, absl::Time now, std::vector<Ending>& endings,
                      std::vector<HiddenPayload>& payloads) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(const Pending& pending, absl::Status status, std::vector<Ending>& endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Ends the read of the payload by one reader. The last reader moves the payload to `payloads`,
  /// to be freed outside the mutex, unless a later batch still has rows to read.
  void EndReadLocked(PendingRequest& pending, std::vector<HiddenPayload>& payloads)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleasePayloadLocked(PendingRequest& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseHeldLocked(PendingRequest& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerAll(std::vector<Ending> endings) ABSL_LOCKS_EXCLUDED(mutex_);
  /// Calls the callbacks. If there are many, the pool's threads share them, unless these threads
  /// answer another batch.
  void CallBack(std::vector<Ending>& endings) ABSL_LOCKS_EXCLUDED(mutex_);
  void Answer(Ending& ending);
  bool IsIdleLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UpdateIdleLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Clock& clock_;
  Metrics& metrics_;
  const int64_t hidden_size_;
  const bool reads_in_place_;
  const std::shared_ptr<Heartbeat> heartbeat_;  // Of the batch thread.
  TaskPool copy_pool_;
  PayloadGather gather_;  // Used by the batch thread only.
  TaskPool answer_pool_;  // Used by the thread that has set is_answer_pool_taken_.
  std::atomic<bool> is_answer_pool_taken_ = false;
  HeadTurns turns_;

  mutable absl::Mutex mutex_;
  VersionSwitch versions_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);   // Set by Fail, until the next Commit.
  std::string rate_kind_ ABSL_GUARDED_BY(mutex_);  // VersionReplicas::kind that `rate_` measures.
  Admission admission_ ABSL_GUARDED_BY(mutex_);
  DrainRate rate_ ABSL_GUARDED_BY(mutex_);
  absl::Duration wait_max_ ABSL_GUARDED_BY(mutex_);  // The batch_wait_max in force.
  absl::flat_hash_map<RequestTicket, Pending> requests_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<absl::Time, RequestTicket>> deadlines_ ABSL_GUARDED_BY(mutex_);
  std::vector<Ending> endings_ ABSL_GUARDED_BY(mutex_);  // Requests for the batch thread to answer.
  RequestTicket last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  int answering_ ABSL_GUARDED_BY(mutex_) = 0;  // Number of threads that are calling callbacks.
  /// True when the batch thread has something to do. Written under the mutex; the busy poll reads
  /// it without the mutex.
  std::atomic<bool> wake_ = false;
  bool is_idle_ ABSL_GUARDED_BY(mutex_) = true;
  bool is_draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time wake_time_ ABSL_GUARDED_BY(mutex_);
  absl::Time published_time_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::array<QueueLoad, kNumPriorities> published_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace logprobd
