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

namespace logprobd {

/// The engines of one version of a head's weights, one a replica, with room for the batches that
/// each has in flight. Made and destroyed outside the Batcher, which guards it in between.
struct Generation {
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
    Slot(Generation& whole, Replica& owner, std::unique_ptr<StagingBuffer> staging)
        : generation(whole), replica(owner), batch(std::move(staging)) {}
    Generation& generation;
    Replica& replica;
    BatchSlot batch;
    SlotState state = SlotState::kFree;
    std::vector<ScatteredPart> scattered;  ///< A part each; of the engine's thread.
  };

  /// `engines`: at least one, all of the same head and batch_rows_max; they must outlive what is
  /// returned. INVALID_ARGUMENT names what is wrong with them or with `options.batch_rows_max`;
  /// RESOURCE_EXHAUSTED: staging memory that is not there.
  static absl::StatusOr<std::unique_ptr<Generation>> Create(
      const Batcher::Options& options, absl::Span<ScoringEngine* const> engines);

  Generation(const Batcher::Options& options, const HeadInfo& head, int64_t row_step);
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

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
};

}  // namespace logprobd
