#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "server/batching/row_queue.h"
#include "server/batching/version_replicas.h"

namespace logprobd {

/// The live version of a head's weights, the version that retires, and the rows that wait for each
/// of them. It decides which version scores a row, and which slot launches the next batch.
///
/// Turns: the live and the retiring version may both have batches in flight, unless they share
/// devices and both have kernels that wait for other GPUs: a batch of one could then wait for
/// kernels that the other prevents from starting. In that case the versions take turns of a few
/// batches, and a turn begins only when the other version has no batch in flight.
///
/// Not thread-safe; the Batcher's mutex guards it.
class VersionSwitch {
 public:
  using Slot = VersionReplicas::Slot;

  /// Number of batches per replica that one version launches in a row while another version waits
  /// for the same devices.
  static constexpr int64_t kTurnBatches = ScoringEngine::kBatchesInFlight;

  explicit VersionSwitch(VersionReplicas& first)
      : live_(&first), live_number_(first.weights_version) {}

  /// Makes `next` live and retires the live version, which keeps the waiting requests of which it
  /// has taken rows or that are pinned to it. If `next` is null, no version is live. The previous
  /// version must have been forgotten.
  void Commit(VersionReplicas* next);
  /// Returns whether no version retires, or the one that does has no rows, batches or hold left.
  bool IsRetired() const;
  /// Forgets the retired version.
  void ForgetRetired();

  /// Returns null while no version is live.
  VersionReplicas* live() const { return live_; }
  /// Returns the weights_version of the live version, or of the last one if there is none.
  uint64_t live_number() const { return live_number_; }
  /// Returns the number of batches in flight of both versions.
  int NumInFlight() const;

  /// Returns the rows for the live version, or for the next one if there is none.
  RowQueue& queue() { return queue_; }
  const RowQueue& queue() const { return queue_; }
  RowQueue& retiring_queue() { return retiring_queue_; }
  /// Returns the rows for `version`, which is live or retires.
  RowQueue& QueueOf(const VersionReplicas& version) {
    return &version == retiring_ ? retiring_queue_ : queue_;
  }
  /// Returns the queue that holds, or held last, the rows of `pending`.
  RowQueue& QueueOf(const PendingRequest& pending) {
    return pending.is_retiring ? retiring_queue_ : queue_;
  }
  bool has_rows() const { return !queue_.empty() || !retiring_queue_.empty(); }
  /// Returns the time at which the longest-waiting request was submitted. Rows must wait.
  absl::Time OldestSubmitted() const;
  /// Returns a queue with rows whose version has no healthy replica, or null.
  RowQueue* FindUnservable();

  /// Returns the slot in which a batch is to be launched now, or null. Rows of the retiring version
  /// are first: its engines are freed when they are done, and waiting would not add rows to their
  /// batches.
  Slot* FindLaunch(absl::Time now) const;
  /// Returns a free slot of the live version, or null if it has none or it is the other's turn.
  Slot* FindFreeSlot() const;
  /// Returns a slot of either version in state kRelaunch, or null if there is none.
  Slot* FindRelaunch() const;
  /// Returns the time at which the live version may launch the next batch: `now` if that is at
  /// once, and infinite if it has no rows, no free slot or not its turn.
  absl::Time LaunchTime(absl::Time now) const;
  /// Returns whether `version`, which is live or retires, has rows and may launch them.
  bool MayLaunch(const VersionReplicas& version) const;

  /// Counts a batch that `version` launches, for the versions' turns.
  void CountBatch(const VersionReplicas& version);
  /// Keeps `version` from retiring while the batch thread uses it without the mutex, until Unhold.
  void Hold(const VersionReplicas& version) { held_ = &version; }
  void Unhold() { held_ = nullptr; }

 private:
  absl::Time LaunchTimeIn(const Slot& slot, absl::Time now) const;
  /// Returns whether a batch of `version` may be started, as the comment of the class says.
  bool IsTurnOf(const VersionReplicas& version) const;

  VersionReplicas* live_;
  VersionReplicas* retiring_ = nullptr;
  uint64_t live_number_;
  RowQueue queue_;
  RowQueue retiring_queue_;  ///< Rows of requests that have is_retiring set.
  const VersionReplicas* held_ = nullptr;
  const VersionReplicas* turn_ = nullptr;  ///< The version that launched last.
  int64_t turn_batches_ = 0;               ///< Number of batches that it has launched in a row.
};

}  // namespace logprobd
