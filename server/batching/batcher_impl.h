#pragma once

#include <array>
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
#include "server/batching/batch_slot.h"
#include "server/batching/batcher.h"
#include "server/batching/copy_pool.h"
#include "server/batching/drain_rate.h"
#include "server/batching/launch_rule.h"
#include "server/batching/payload_gather.h"
#include "server/batching/pending_request.h"
#include "server/batching/result_scatter.h"
#include "server/batching/row_queue.h"

namespace logprobd {

Admission::Limits AdmissionLimits(const Batcher::Options& options);

/// The Batcher's state and threads. batcher_submit.cc holds what callers' threads do,
/// batcher_thread.cc the batch thread, batcher_done.cc what follows a batch's end.
///
/// One mutex guards all but the batches; it is never held while a callback, a batch's start, the
/// metrics or a copy runs. Callbacks run on the batch thread or an engine's, never inside Submit
/// or Cancel.
struct Batcher::Impl {
  Impl(const Options& options, const HeadInfo& head, const Clock& clock, Metrics& metrics);

  /// Before Start; `staging` is the engine's own, one buffer for each of its batches in flight.
  void AddReplica(ScoringEngine& engine, std::vector<std::unique_ptr<StagingBuffer>> staging);
  absl::Status Start();
  void Stop();
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done);
  void Cancel(RequestTicket ticket);
  bool Drain(absl::Time deadline);
  MemoryPlan memory() const;

 private:
  using Pending = std::shared_ptr<PendingRequest>;

  /// A request that has left the maps and waits for its callback to be called.
  struct Ending {
    Pending pending;
    absl::Status status;    ///< OK: its result is in place.
    HiddenPayload payload;  ///< Freed outside the mutex, and only then no longer charged.
  };

  enum class SlotState {
    kFree,
    kInFlight,
    kRelaunch,  ///< A half of a batch that did not fit is to be started.
  };

  struct Replica {
    ScoringEngine& engine;
    int index;
    int in_flight = 0;  ///< Its slots that are not free.
  };

  /// Room for a batch of one replica, which reads its staging memory.
  struct Slot {
    Slot(Replica& owner, std::unique_ptr<StagingBuffer> staging)
        : replica(owner), batch(std::move(staging)) {}
    Replica& replica;
    BatchSlot batch;
    SlotState state = SlotState::kFree;
    std::vector<ScatteredPart> scattered;  ///< A part each; of the engine's thread.
  };

  // Any thread.
  int NumHealthy() const;
  Slot* FindFreeSlotLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Callers' threads.
  absl::Status AdmitLocked(const Pending& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckDeadlineLocked(const PendingRequest& pending, absl::Time now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The batch thread. Those that unlock the mutex for a while hold it again on return.
  void Run();
  bool DoNextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status DeadlinePassed(const PendingRequest& pending);
  void ExpireDeadlinesLocked(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndQueuedLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerEndingsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LaunchLocked(Slot& slot, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool FinishGatherLocked(Slot& slot, std::vector<HiddenPayload>& payloads)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropBatchLocked(Slot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RelaunchLocked(Slot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool PublishGaugesLocked(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time NextWakeLocked(absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Slot* FindRelaunchLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FillBatch(Slot& slot, std::vector<BatchPart> parts);
  void StartBatch(Slot& slot) ABSL_LOCKS_EXCLUDED(mutex_);

  // The end of batches and requests, on the engine's thread or the batch thread.
  void OnBatchDone(Slot& slot, const absl::Status& engine_status);
  void RecordEngineStages(const ScoreBatch& batch);
  void EndBatchLocked(Slot& slot, absl::Time now, std::vector<Ending>& endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(const Pending& pending, absl::Status status, std::vector<Ending>& endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleasePayloadLocked(PendingRequest& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseHeldLocked(PendingRequest& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerAll(std::vector<Ending> endings) ABSL_LOCKS_EXCLUDED(mutex_);
  void Answer(Ending& ending);
  bool IsIdleLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UpdateIdleLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Clock& clock_;
  Metrics& metrics_;
  const int64_t hidden_size_;
  const uint64_t weights_version_;
  CopyPool copy_pool_;
  PayloadGather gather_;  // of the batch thread
  std::vector<std::unique_ptr<Replica>> replicas_;
  std::vector<std::unique_ptr<Slot>> slots_;  // of all replicas

  absl::Mutex mutex_;
  RowQueue queue_ ABSL_GUARDED_BY(mutex_);
  Admission admission_ ABSL_GUARDED_BY(mutex_);
  DrainRate rate_ ABSL_GUARDED_BY(mutex_);
  LaunchRule launch_rule_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<RequestTicket, Pending> requests_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<absl::Time, RequestTicket>> deadlines_ ABSL_GUARDED_BY(mutex_);
  std::vector<Ending> endings_ ABSL_GUARDED_BY(mutex_);  // for the batch thread to answer
  RequestTicket last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  int answering_ ABSL_GUARDED_BY(mutex_) = 0;  // threads that call callbacks
  bool wake_ ABSL_GUARDED_BY(mutex_) = false;  // the batch thread has something to look at
  bool is_idle_ ABSL_GUARDED_BY(mutex_) = true;
  bool is_draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time wake_time_ ABSL_GUARDED_BY(mutex_);
  absl::Time published_time_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::array<QueueLoad, kNumPriorities> published_ ABSL_GUARDED_BY(mutex_);
  bool has_published_age_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace logprobd
