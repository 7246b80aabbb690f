#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/outputs.h"
#include "server/base/score_request.h"
#include "server/base/scoring_engine.h"
#include "server/base/served_head.h"
#include "server/batching/admission.h"
#include "server/batching/device_turns.h"
#include "server/metrics/metrics.h"

namespace logprobd {

class StagingStore;
struct VersionReplicas;

/// Groups the rows of requests into batches for the engines of one head, called its replicas.
///
///   Submit (any thread) -> queues by priority and client -> batch thread: cut, gather rows into a
///   staging buffer (copy pool) -> engine.Start -> results scattered to requests -> callbacks
///
/// Scheduling: a batch is launched when a replica is free and requests wait (launch_rule.h), on the
/// healthy replica with the fewest batches in flight. Batches of different replicas may end in any
/// order. An unhealthy replica receives no more batches; those it already has end with its error. A
/// request may be split between any two rows; ignored rows never reach the engine. Within a
/// priority, clients share batches fairly (deficit round robin over rows); lower priorities keep a
/// guaranteed share.
///
/// Completion: deadline and cancellation are checked at Submit, in the queue and before launch, and
/// also while an engine hangs. Each request ends in exactly one way: either Submit fails and `done`
/// is destroyed without being called, or `done` is called once, on the batch thread, an engine's
/// thread or a thread of the answer pool. `done` is never called inside Submit or Cancel, and never
/// under a lock.
///
/// Versions: Commit makes the engines of another version of the weights live between two batches.
/// No request is scored by two versions, and none fails or waits because of a commit: the old
/// engines finish each request that is pinned to the old version, or of which a batch of the old
/// version has already taken rows.
class Batcher {
 public:
  struct Options {
    /// Maximum number of rows in a batch, from 1 to the replicas' batch_rows_max().
    int64_t batch_rows_max = kDefaultBatchRowsMax;
    /// Maximum time that a request waits for others to share its batch while every healthy replica
    /// has a batch in flight. If a replica is idle, a batch is launched at once. Zero means that
    /// requests never wait for others.
    absl::Duration batch_wait_max = absl::Microseconds(500);
    /// Maximum number of rows waiting to be scored, >= 1. A request with more rows than one
    /// client's share is never admitted.
    int64_t queue_rows_max = 262'144;
    /// Maximum number of bytes held for requests. A message counts until its rows are gathered into
    /// a batch; its decoded fields and its answer count until it is answered (score_request.h).
    int64_t queue_bytes_max = int64_t{1} << 30;
    int64_t queue_requests_max = 65'536;  ///< Maximum number of waiting requests, >= 1.
    /// Share of the three limits above that one client may hold, in (0, 1].
    double client_share_max = 0.5;
    /// Time for which the batch thread busy-polls for the next request before it sleeps.
    /// Waking a sleeping thread adds about 50 us to a small request; polling occupies a core. Zero
    /// means that the thread sleeps at once.
    absl::Duration busy_poll = absl::ZeroDuration();
    /// Number of threads, 0 to 256, that gather payloads into staging memory in addition to the
    /// batch thread.
    int32_t copy_threads = 2;
    /// Number of threads, 0 to 256, that call callbacks when a batch answers many requests, in
    /// addition to the thread on which the batch ended. Sending one answer takes about 25 us.
    int32_t answer_threads = 0;
    /// Value of the metrics' label `head`.
    std::string head = "default";
    /// Turns of the heads that share devices, which must outlive the Batcher. The lanes of this
    /// head are the replicas. Null if no other head uses the devices.
    DeviceTurns* turns = nullptr;
    int turns_head = 0;  ///< Index of this head in `turns`.
    /// Store through which versions of this head pass on their staging buffers; it must outlive
    /// them. If it is null, each version allocates and frees its own buffers.
    StagingStore* staging = nullptr;
    /// Table for the heartbeat of the batch thread, which must outlive the Batcher; may be null.
    Heartbeats* heartbeats = nullptr;
  };

  /// Creates a Batcher whose live version is `first`, which must stay alive until it has retired or
  /// the Batcher is destroyed. Returns INVALID_ARGUMENT that names the invalid option. `clock` and
  /// `metrics` must outlive the Batcher.
  static absl::StatusOr<std::unique_ptr<Batcher>> Create(const Options& options,
                                                         VersionReplicas& first, const Clock& clock,
                                                         Metrics& metrics);

  /// Calls Stop.
  ~Batcher();

  /// Answers queued requests with UNAVAILABLE, waits for the batches in flight and joins its
  /// threads. From then on Submit returns UNAVAILABLE and Cancel does nothing. Must be called from
  /// one thread; may be called again.
  void Stop();

  /// Implements ServedHead::Submit; `request` must have been validated. Returns these additional
  /// errors, which carry a reason (errors.h):
  ///   - INVALID_ARGUMENT: the request has more rows or bytes than could ever be admitted.
  ///   - FAILED_PRECONDITION: the weights_version is neither 0 nor the live one, or the rows are in
  ///     a GPU's memory and an engine does not read in place.
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done);

  /// Implements ServedHead::Cancel.
  void Cancel(RequestTicket ticket);

  /// Applies the queue limits, client_share_max and batch_wait_max of `options`; all other options
  /// are fixed at creation. Queued requests stay queued. Returns INVALID_ARGUMENT like Create and
  /// then changes nothing.
  absl::Status SetLimits(const Options& options);

  /// Makes `next`, which must have the same hidden_size and reads_in_place, the live version and
  /// returns at once. The previous version retires: its engines first score the requests of which
  /// it has taken rows or that are pinned to it; `next` scores all others. If `next` is null, no
  /// version is live, and requests that do not belong to the retiring version wait. Must be called
  /// from one thread at a time, and AwaitRetired must be called before the next Commit.
  void Commit(VersionReplicas* next);

  /// Waits until the version that Commit retired has no rows or batches left, so that its engines
  /// may be destroyed, or until `until` of the batcher's clock. Returns whether no version is
  /// retiring.
  bool AwaitRetired(absl::Time until = absl::InfiniteFuture());

  /// Ends all waiting requests with `why` and refuses new ones until the next Commit. Only allowed
  /// after Commit(nullptr).
  void Fail(const absl::Status& why);

  /// Ends all requests with `why`, on the calling thread, and refuses new ones. It needs neither
  /// the batch thread nor an engine, either of which may hang; the Batcher stays usable for nothing
  /// but the end of the process. Answers that another thread is giving are left to it.
  void Abandon(const absl::Status& why);

  /// Refuses new requests from now on. Returns true once nothing is queued or in flight, or false
  /// at `deadline` (on the Clock) if work is left.
  bool Drain(absl::Time deadline);

  /// Returns the memory of the staging buffers of all replicas of the live version.
  MemoryPlan memory() const;

  /// Returns the bytes of one staging buffer for batches of `batch_rows_max` rows of `head`. A
  /// replica has one buffer for each of its batches in flight.
  static int64_t StagingBytes(int64_t batch_rows_max, const HeadInfo& head);

  /// Returns the maximum number of rows, bytes and requests that one client may have waiting.
  static QueueLoad ClientLimits(const Options& options);

 private:
  struct Impl;
  explicit Batcher(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
