#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/collective.h"

namespace logprobd {

/// Coordinates the shards of an engine: the shards agree on one status and reduce their arrays. A
/// rank is the number of a shard. Thread-safe, provided that each rank makes its calls from one
/// thread at a time.
class RankTeam {
 public:
  /// `collective` may be null for a team of one rank.
  RankTeam(int32_t size, std::unique_ptr<Collective> collective);

  int32_t size() const { return size_; }
  Collective& collective() { return *collective_; }

  /// Blocks until every rank has passed its status, and returns the same status to all of them: OK,
  /// or the failure of the lowest rank that failed. Ranks call it before their devices wait for
  /// each other, so that no device waits for a rank that has failed.
  absl::Status Agree(int32_t rank, absl::Status status);

  /// Ends all present and future waits of all ranks with `why`. Only the first call sets the
  /// reason.
  void Abort(const absl::Status& why);

  /// Returns the reason that was passed to Abort, or OK.
  absl::Status aborted() const;

 private:
  const int32_t size_;
  const std::unique_ptr<Collective> collective_;
  Rendezvous barrier_;
  std::vector<absl::Status> rounds_[2];  ///< [size] each; the statuses of two alternating rounds.
  std::vector<uint8_t> next_round_;      ///< [size]; each rank's thread uses its own element.
  mutable absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
