#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/collective.h"
#include "server/engine/rendezvous.h"

namespace logprobd {

/// What the shards of an engine need to act as one: one answer for all of them, and a way to join
/// their arrays. A rank is a shard's number. Thread-safe; a rank's calls come from one thread at a
/// time.
class RankTeam {
 public:
  /// `collective` may be null for a team of one.
  RankTeam(int32_t size, std::unique_ptr<Collective> collective);

  int32_t size() const { return size_; }
  Collective& collective() { return *collective_; }

  /// Blocks until every rank has said how it stands, and gives all of them the same answer: OK, or
  /// the lowest rank's failure. Taken before anything that waits for the other ranks on a device:
  /// a failure that is known to all leaves nobody waiting.
  absl::Status Agree(int32_t rank, absl::Status status);

  /// Ends every wait of every rank with `why`, for good. The first reason stays.
  void Abort(const absl::Status& why);

  /// Why it was aborted, or OK.
  absl::Status aborted() const;

 private:
  const int32_t size_;
  const std::unique_ptr<Collective> collective_;
  Rendezvous meeting_;
  std::vector<absl::Status> rounds_[2];  ///< [size]: what ranks said; two may be open at a time.
  std::vector<uint8_t> next_round_;      ///< [size], of the rank's own thread.
  mutable absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
