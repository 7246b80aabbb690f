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

/// The spare staging buffers of a head: those that no version uses now. A new version takes over
/// the buffers of an old one, because no kernel of the process can launch while memory is
/// page-locked or freed.
///
/// Thread-safe. The buffers outlive the engines that allocated them.
class StagingStore {
 public:
  /// Allocates `count` spares for `replica`. RESOURCE_EXHAUSTED: there is not enough memory.
  absl::Status Reserve(int replica, ScoringEngine& engine, int64_t size_bytes, int count);

  /// Returns a spare of exactly `size_bytes` that belonged to the same replica, since its memory is
  /// near that replica's device. If there is none, `engine` allocates a buffer; errors are its own.
  absl::StatusOr<std::unique_ptr<StagingBuffer>> Take(int replica, ScoringEngine& engine,
                                                      int64_t size_bytes);

  /// Adds `buffer`, which nothing uses any more, to the spares.
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

/// The engines of one version of a head's weights, one per replica, with the slots for their
/// batches in flight. Created and destroyed outside the Batcher; in between, the Batcher's mutex
/// guards it.
struct VersionReplicas {
  enum class SlotState {
    kFree,
    kInFlight,
    kRelaunch,  ///< The next half of a batch that did not fit is to be started.
  };

  struct Replica {
    ScoringEngine& engine;
    int index;
    int in_flight = 0;                               ///< Number of its slots that are not free.
    absl::Time busy_since = absl::InfiniteFuture();  ///< When work on its oldest batch began.
    /// How long its last batch took; infinite before the first one ends.
    absl::Duration last_batch = absl::InfiniteDuration();

    void NoteBegin(absl::Time now) {
      if (in_flight++ == 0) busy_since = now;
    }
    void NoteEnd(absl::Time now) {
      last_batch = now - busy_since;
      busy_since = --in_flight == 0 ? absl::InfiniteFuture() : now;
    }
    /// A batch that was dropped before the engine received it.
    void NoteDrop() {
      if (--in_flight == 0) busy_since = absl::InfiniteFuture();
    }
    /// When its oldest batch will end if it takes as long as the last one.
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
    std::vector<ScatteredPart> scattered;  ///< One per part; used on the engine's thread.
  };

  /// `engines`: at least one, all of the same head and batch_rows_max; they must outlive the
  /// result. INVALID_ARGUMENT names what is wrong with them or with `options.batch_rows_max`;
  /// RESOURCE_EXHAUSTED: there is not enough memory for staging. Takes the spares in
  /// `options.staging` that fit and frees the others.
  static absl::StatusOr<std::unique_ptr<VersionReplicas>> Create(
      const Batcher::Options& options, absl::Span<ScoringEngine* const> engines);

  VersionReplicas(const Batcher::Options& options, const ScoringEngine& engine);
  /// Returns the staging buffers to `options.staging`. No batch may be in flight.
  ~VersionReplicas();
  VersionReplicas(const VersionReplicas&) = delete;
  VersionReplicas& operator=(const VersionReplicas&) = delete;

  int NumHealthy() const;
  int NumInFlight() const;
  /// A free slot of the healthy replica with the fewest batches in flight; null if none is free.
  Slot* FindFreeSlot() const;
  /// A slot in state kRelaunch, or null.
  Slot* FindRelaunch() const;
  int64_t staging_bytes() const;

  const uint64_t weights_version;
  const int64_t hidden_size;
  /// Engine and dtype. Batches of equally many rows take about the same time on two versions of the
  /// same kind.
  const std::string kind;
  /// True if its kernels wait for kernels on other GPUs. Two such versions on the same GPUs must
  /// not have batches in flight at the same time: each could wait for kernels that cannot begin.
  const bool waits_for_peers;
  bool reads_in_place = true;  ///< True when every engine reads rows in place; set by Create.
  LaunchRule launch_rule;
  std::vector<std::unique_ptr<Replica>> replicas;
  std::vector<std::unique_ptr<Slot>> slots;  ///< Slots of all replicas.

 private:
  StagingStore* const staging_;
};

}  // namespace logprobd
