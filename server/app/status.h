#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/head_info.h"
#include "server/http/status_page.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// What only the server itself knows of a head's state.
struct HeadStatus {
  HeadInfo info;
  ServingState state = ServingState::kNotReady;
  std::string state_text;
  std::vector<bool> is_replica_healthy = {};  ///< [num_replicas]; empty before it is loaded.
  int64_t queue_rows_max = 0;                 ///< 0: not known.
};

/// The same of the whole server.
struct ServerStatus {
  std::string version;
  std::string commit;
  ServingState state = ServingState::kNotReady;
  std::string state_text;
  std::vector<HeadStatus> heads = {};
  MemoryPlan memory = {};  ///< Of all heads.
  std::vector<std::string> warnings = {};
};

/// Fills the status page: facts as given, figures from the metrics. Rates and latencies are of the
/// last minute, or of the time since the start where that is less: metrics are looked at every few
/// seconds, whether or not somebody looks at the page. Thread-safe.
class StatusBoard {
 public:
  /// `metrics` and `clock` must outlive it.
  StatusBoard(Metrics& metrics, const Clock& clock);

  /// Looks at the metrics if the last look is kSamplePeriod old. Asks no GPU, so it does not wait.
  /// To be called more often than that.
  void Sample();

  /// The page now. Asks the driver about the GPUs, as a scrape does.
  StatusPage Page(const ServerStatus& facts);

  static constexpr absl::Duration kWindow = absl::Seconds(60);
  static constexpr absl::Duration kSamplePeriod = absl::Seconds(5);

 private:
  struct Look {
    absl::Time time;
    MetricsSnapshot metrics;
  };

  /// The look that lies a window back, or the oldest.
  Look Baseline(absl::Time now) const;

  Metrics& metrics_;
  const Clock& clock_;
  const absl::Time start_;
  mutable absl::Mutex mutex_;
  /// From the oldest; never empty. Holds the youngest that is a window old, and all after it.
  std::deque<Look> looks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
