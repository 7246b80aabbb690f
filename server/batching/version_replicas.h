#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/base/scoring_engine.h"
#include "server/batching/batch_slot.h"
#include "server/batching/batcher.h"
#include "server/batching/launch_rule.h"
#include "server/batching/result_scatter.h"

namespace logprobd {

/// Holds the spare staging buffers of a head, which are the buffers that no version uses now. A new
/// version takes over the buffers of an old one, because no kernel of the process can launch while
/// memory is page-locked or freed.
///
/// Thread-safe. The buffers outlive the engines that allocated them.
class StagingStore {
 public:
  /// Allocates `count` spares for `replica`. Returns RESOURCE_EXHAUSTED if memory runs out.
  absl::Status Reserve(int replica, ScoringEngine& engine, int64_t size_bytes, int count);

  /// Returns a spare of exactly `size_bytes` that belonged to the same replica, since its memory is
  /// near that replica's device. If there is none, `engine` allocates a buffer, and Take returns
  /// the engine's errors.
  absl::StatusOr<std::unique_ptr<StagingBuffer>> Take(int replica, ScoringEngine& engine,
                                                      int64_t size_bytes);

  /// Adds `buffer`, which must no longer be in use, to the spares.
  void Return(int replica, std::unique_ptr<StagingBuffer> buffer);

  /// Frees the spares that a version of `num_replicas` with buffers of `size_bytes` cannot use.
  void FreeAllBut(int num_replicas, int64_t size_bytes);

  int64_t spare_bytes() const;

 private:
  struct Spare {
    int replica;
    std::unique_ptr<StagingBuffer> buffer;
  };

  mutable absl::Mutex mutex_;
  std::vector<Spare> spares_ ABSL_GUARDED_BY(mutex_);
};

/// Holds the engines of one version of a head's weights, one per replica, with the slots for their
/// batches in flight. It is created and destroyed outside the Batcher; in between, the Batcher's
/// mutex guards it.
struct VersionReplicas {
  enum class SlotState {
    kFree,
    kInFlight,
    kRelaunch,  ///< The next half of a batch that did not fit must be started.
  };

  struct Replica {
    ScoringEngine& engine;
    int index;
    int in_flight = 0;                               ///< Number of slots that are not free.
    absl::Time busy_since = absl::InfiniteFuture();  ///< When work on the oldest batch began.
    /// Duration of the last batch; infinite before the first batch ends.
    absl::Duration last_batch = absl::InfiniteDuration();

    void NoteBegin(absl::Time now) {
      if (in_flight++ == 0) busy_since = now;
    }
    void NoteEnd(absl::Time now) {
      last_batch = now - busy_since;
      busy_since = --in_flight == 0 ? absl::InfiniteFuture() : now;
    }
    /// Records that a batch was dropped before the engine received it.
    void NoteDrop() {
      if (--in_flight == 0) busy_since = absl::InfiniteFuture();
    }
    /// Returns when the oldest batch will end if it takes as long as the last one.
    absl::Time idle_time() const { return busy_since + last_batch; }
  };

  /// Memory and state for one batch in flight of a replica.
  struct Slot {
    Slot(VersionReplicas& owning_version, Replica& owning_replica,
         std::unique_ptr<StagingBuffer> staging)
        : version(owning_version), replica(owning_replica), batch(std::move(staging)) {}
    VersionReplicas& version;
    Replica& replica;
    BatchSlot batch;
    SlotState state = SlotState::kFree;
    std::vector<ScatteredPart> scattered;  ///< One per part; only the engine's thread uses them.
  };

  /// Creates a version from `engines`, which must not be empty, must all have the same head and
  /// batch_rows_max, and must outlive the result. Takes the spares in `options.staging` that fit
  /// and frees the others. Returns INVALID_ARGUMENT if `engines` or `options.batch_rows_max` is
  /// invalid, and RESOURCE_EXHAUSTED if there is not enough memory for staging.
  static absl::StatusOr<std::unique_ptr<VersionReplicas>> Create(
      const Batcher::Options& options, absl::Span<ScoringEngine* const> engines);

  VersionReplicas(const Batcher::Options& options, const ScoringEngine& engine);
  /// Returns the staging buffers to `options.staging`. No batch may be in flight.
  ~VersionReplicas();
  VersionReplicas(const VersionReplicas&) = delete;
  VersionReplicas& operator=(const VersionReplicas&) = delete;

  int NumHealthy() const;
  int NumInFlight() const;
  /// Returns a free slot of the healthy replica with the fewest batches in flight, or null if there
  /// is none.
  Slot* FindFreeSlot() const;
  /// Returns the healthy replicas that have a free slot, those with the fewest batches in flight
  /// first.
  std::vector<int> FreeReplicas() const;
  /// Returns a free slot of `replica`, which must have one.
  Slot& FreeSlotOf(int replica) const;
  /// Returns a slot in state kRelaunch, or null if there is none.
  Slot* FindRelaunch() const;
  int64_t staging_bytes() const;

  const uint64_t weights_version;
  const int64_t hidden_size;
  /// Engine and dtype. Batches with the same number of rows take about the same time on two
  /// versions of the same kind.
  const std::string kind;
  /// True if its kernels wait for kernels on other GPUs. Two such versions on the same GPUs must
  /// not have batches in flight at the same time, because each could wait for kernels that cannot
  /// start.
  const bool waits_for_peers;
  bool reads_in_place = true;  ///< True if every engine reads rows in place; set by Create.
  LaunchRule launch_rule;
  std::vector<std::unique_ptr<Replica>> replicas;
  std::vector<std::unique_ptr<Slot>> slots;  ///< Slots of all replicas.

 private:
  StagingStore* const staging_;
};

}  // namespace logprobd
