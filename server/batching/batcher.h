#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/base/clock.h"
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

/// Groups the rows of requests into batches for the engines of one head, its replicas.
///
///   Submit (any thread) -> queues by priority and client -> batch thread: cut, gather rows into a
///   staging buffer (copy pool) -> engine.Start -> results scattered to requests -> callbacks
///
/// Work-conserving: a batch leaves when a replica is free and something waits (launch_rule.h), to
/// the healthy replica with the fewest batches in flight. Batches of different replicas end in any
/// order. An unhealthy replica gets no more of them; the batches that it has end with its errors.
/// Rows of a request may be cut anywhere; ignored rows never reach the engine. Fair over clients
/// (deficit round robin over rows) within a priority; lower priorities keep a share. Deadline and
/// cancellation are checked at Submit, in the queue and before launch, also while the engine is
/// stuck. Each request ends in exactly one way: Submit fails and `done` is dropped, or `done` is
/// called once, on the batch thread, an engine's or the answer pool's, never inside Submit or
/// Cancel and under no lock.
///
/// The engines can be replaced while it works: Commit makes those of another version of the weights
/// live between two cuts. No request sees two versions, and none fails or waits for it: what has
/// begun on the old version, or is pinned to it, ends on the engines that retire.
class Batcher {
 public:
  struct Options {
    /// Most rows in a batch, 1 to batch_rows_max() of the replicas.
    int64_t batch_rows_max = 8'192;
    /// Longest wait for company while each healthy replica has a batch in flight; with one idle a
    /// batch leaves at once. Zero: never wait.
    absl::Duration batch_wait_max = absl::Microseconds(500);
    /// Most rows waiting to be scored, >= 1. A request longer than a client's share is never
    /// admissible.
    int64_t queue_rows_max = 262'144;
    /// Most bytes of messages until they are gathered for a batch, and of fields and answers until
    /// they are answered (score_request.h).
    int64_t queue_bytes_max = int64_t{1} << 30;
    int64_t queue_requests_max = 65'536;
    /// Share of the limits above that one client may hold, above 0, at most 1.
    double client_share_max = 0.5;
    /// How long the batch thread looks for the next request before it sleeps, on a real clock:
    /// waking it up takes some 50 us of a small request's time, looking takes a core. Zero: not at
    /// all.
    absl::Duration busy_poll = absl::ZeroDuration();
    /// Threads that gather payloads into staging memory beside the batch thread, 0 to 256.
    int32_t copy_threads = 2;
    /// Threads that call callbacks beside the one on which a batch ended, where it answers many
    /// requests, 0 to 256: sending an answer takes some 25 us.
    int32_t answer_threads = 0;
    /// Label of the metrics.
    std::string head = "default";
    /// The turns of heads that share devices, which outlive the Batcher, and the number of this
    /// head there; its lanes are the replicas. Null: the devices are this head's own.
    DeviceTurns* turns = nullptr;
    int turns_head = 0;
    /// Where the head's generations take their staging from and leave it, for the next ones; it
    /// outlives them. Null: each allocates and frees its own.
    StagingStore* staging = nullptr;
  };

  /// `replicas`: at least one, none null, all of the same head and batch_rows_max. INVALID_ARGUMENT
  /// names the bad option, RESOURCE_EXHAUSTED staging memory that is not there. The replicas,
  /// `clock` and `metrics` must outlive the Batcher.
  static absl::StatusOr<std::unique_ptr<Batcher>> Create(const Options& options,
                                                         absl::Span<ScoringEngine* const> replicas,
                                                         const Clock& clock, Metrics& metrics);

  /// As above, with a generation that is the caller's and must stay until it has been retired or
  /// the Batcher is gone.
  static absl::StatusOr<std::unique_ptr<Batcher>> Create(const Options& options,
                                                         VersionReplicas& first, const Clock& clock,
                                                         Metrics& metrics);

  /// As Stop.
  ~Batcher();

  /// Answers what is queued with UNAVAILABLE, waits for the batches in flight, joins its threads.
  /// From then on Submit is UNAVAILABLE and Cancel does nothing. From one thread; may be repeated.
  void Stop();

  /// As ServedHead::Submit; the request has been validated. Also INVALID_ARGUMENT for more rows or
  /// bytes than could ever be admitted, and FAILED_PRECONDITION for a weights_version other than 0
  /// and the live one, and for rows in a GPU's memory where an engine does not read in place.
  /// Refusals carry their reason (RejectionOf).
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done);

  /// As ServedHead::Cancel.
  void Cancel(RequestTicket ticket);

  /// Takes over from `options` the limits of the queue, client_share_max and batch_wait_max; the
  /// rest is fixed at creation. What is queued stays. INVALID_ARGUMENT as in Create: then nothing
  /// changes.
  absl::Status SetLimits(const Options& options);

  /// Makes `next`, of the same hidden_size, live; returns at once. The generation before retires:
  /// requests that have begun on it or are pinned to it go to its engines first, all others to
  /// `next`. Null: no version is live for now, and what is not the retiring one's waits. From one
  /// thread at a time, which calls AwaitRetired before the next Commit.
  void Commit(VersionReplicas* next);

  /// Returns when the generation that Commit has retired has no row and no batch left, so that its
  /// engines may be destroyed. At once if there is none.
  void AwaitRetired();

  /// Between Commit(nullptr) and the next Commit: ends what waits with `why` and refuses what
  /// comes.
  void Fail(const absl::Status& why);

  /// Refuses new requests from now on and returns when nothing is queued or in flight, or at
  /// `deadline` (on the Clock); whether all work was finished.
  bool Drain(absl::Time deadline);

  /// The staging buffers of all replicas of the live generation.
  MemoryPlan memory() const;

  /// Bytes of a staging buffer for batches of `batch_rows_max` rows of `head`; each replica has one
  /// for each of its batches in flight.
  static int64_t StagingBytes(int64_t batch_rows_max, const HeadInfo& head);

  /// What one client may have waiting.
  static QueueLoad ClientLimits(const Options& options);

 private:
  struct Impl;
  explicit Batcher(std::unique_ptr<Impl> impl);
  std::unique_ptr<VersionReplicas> first_;  // where it is not the caller's
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
