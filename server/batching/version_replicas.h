#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/scoring_engine.h"
#include "server/batching/batch_slot.h"
#include "server/batching/batcher.h"
#include "server/batching/launch_rule.h"
#include "server/batching/result_scatter.h"
#include "server/batching/staging_store.h"

namespace logprobd {

/// The engines of one version of a head's weights, one a replica, with room for the batches that
/// each has in flight. Made and destroyed outside the Batcher, which guards it in between.
struct VersionReplicas {
  enum class SlotState {
    kFree,
    kInFlight,
    kRelaunch,  ///< A half of a batch that did not fit is to be started.
  };

  struct Replica {
    ScoringEngine& engine;
    int index;
    int in_flight = 0;                                     ///< Its slots that are not free.
    absl::Time busy_since = absl::InfiniteFuture();        ///< With the first of them.
    absl::Duration last_batch = absl::InfiniteDuration();  ///< How long one had it; not measured.

    void NoteBegin(absl::Time now) {
      if (in_flight++ == 0) busy_since = now;
    }
    void NoteEnd(absl::Time now) {
      last_batch = now - busy_since;
      busy_since = --in_flight == 0 ? absl::InfiniteFuture() : now;
    }
    /// One that the engine was not given.
    void NoteDrop() {
      if (--in_flight == 0) busy_since = absl::InfiniteFuture();
    }
    /// When it ends its first batch, if that takes as long as the one before.
    absl::Time idle_time() const { return busy_since + last_batch; }
  };

  /// Room for a batch of one replica, which reads its staging memory.
  struct Slot {
    Slot(VersionReplicas& whole, Replica& owner, std::unique_ptr<StagingBuffer> staging)
        : generation(whole), replica(owner), batch(std::move(staging)) {}
    VersionReplicas& generation;
    Replica& replica;
    BatchSlot batch;
    SlotState state = SlotState::kFree;
    std::vector<ScatteredPart> scattered;  ///< A part each; of the engine's thread.
  };

  /// `engines`: at least one, all of the same head and batch_rows_max; they must outlive what is
  /// returned. INVALID_ARGUMENT names what is wrong with them or with `options.batch_rows_max`;
  /// RESOURCE_EXHAUSTED: staging memory that is not there. Of the spares in `options.staging` those
  /// that fit are taken and the others freed.
  static absl::StatusOr<std::unique_ptr<VersionReplicas>> Create(
      const Batcher::Options& options, absl::Span<ScoringEngine* const> engines);

  VersionReplicas(const Batcher::Options& options, const ScoringEngine& engine);
  /// Its staging goes back to `options.staging`. No batch is in flight.
  ~VersionReplicas();
  VersionReplicas(const VersionReplicas&) = delete;
  VersionReplicas& operator=(const VersionReplicas&) = delete;

  int NumHealthy() const;
  int NumInFlight() const;
  /// A slot of the healthy replica with the fewest batches in flight, null if all have both.
  Slot* FindFreeSlot() const;
  /// A slot with a half to be started, or null.
  Slot* FindRelaunch() const;
  int64_t staging_bytes() const;

  const uint64_t weights_version;
  const int64_t hidden_size;
  /// Batches of equal rows take about as long on two generations whose kinds are equal.
  const std::string kind;
  /// Its kernels wait for those of other GPUs, so that those of another such generation on the same
  /// GPUs must not be launched between them: either could wait for what cannot begin.
  const bool waits_for_peers;
  bool reads_in_place = true;  ///< Every engine does; fixed once it is made.
  LaunchRule launch_rule;
  std::vector<std::unique_ptr<Replica>> replicas;
  std::vector<std::unique_ptr<Slot>> slots;  ///< Of all replicas.

 private:
  StagingStore* const staging_;
};

}  // namespace logprobd
