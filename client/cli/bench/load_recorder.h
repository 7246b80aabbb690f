#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/bench/load_result.h"

namespace logprobd::client {

/// Collects what the threads of a run find. Each thread writes to a part of its own as far as there
/// are parts; Take merges them. Thread-safe.
class LoadRecorder {
 public:
  explicit LoadRecorder(size_t num_sizes) : num_sizes_(num_sizes) {}

  /// A request of size `size` (an index) with `rows` rows was answered, or failed.
  void RecordAnswer(size_t size, int64_t rows, double seconds, Transport transport);
  void RecordFailure(size_t size, const absl::Status& status);
  /// A request left `seconds` after its planned time.
  void RecordLate(double seconds, bool by_server);
  /// The run ended before `count` requests that were due had left.
  void RecordUnsent(int64_t count);

  /// What came since the last Take. Its times are the caller's to set.
  Interval Take();

 private:
  static constexpr size_t kParts = 8;
  struct alignas(64) Part {
    absl::Mutex mutex;
    Interval found ABSL_GUARDED_BY(mutex);
  };

  Part& OwnPart();
  SizeStats& StatsOf(Part& part, size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(part.mutex);

  const size_t num_sizes_;
  std::array<Part, kParts> parts_;
};

}  // namespace logprobd::client
