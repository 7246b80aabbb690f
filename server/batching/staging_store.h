#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/base/scoring_engine.h"

namespace logprobd {

/// The staging buffers that no generation of a head has now. They go from one generation to the
/// next: while memory is page-locked or freed, no kernel of the process is launched.
///
/// Thread-safe. Buffers outlive the engines that allocated them.
class StagingStore {
 public:
  /// Allocates `count` spares for `replica`. RESOURCE_EXHAUSTED when the memory is not there.
  absl::Status Reserve(int replica, ScoringEngine& engine, int64_t size_bytes, int count);

  /// A spare of exactly `size_bytes` that was this replica's, since memory lies near its device;
  /// else `engine` allocates one, with its errors.
  absl::StatusOr<std::unique_ptr<StagingBuffer>> Take(int replica, ScoringEngine& engine,
                                                      int64_t size_bytes);

  /// Makes a spare of `buffer`, which nothing uses any more.
  void Return(int replica, std::unique_ptr<StagingBuffer> buffer);

  /// Frees the spares that a generation of `num_replicas` with buffers of `size_bytes` has no use
  /// for.
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

}  // namespace logprobd
