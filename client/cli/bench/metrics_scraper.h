#pragma once

#include <optional>
#include <string>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cli/bench/prometheus_text.h"
#include "client/cli/bench/server_figures.h"

namespace logprobd::client {

/// Gives a page of metrics as text.
using MetricsSource = absl::AnyInvocable<absl::StatusOr<std::string>()>;

/// A source that reads "host:port", "http://host:port" or "http://host:port/path" (default:
/// /metrics) within five seconds a time. INVALID_ARGUMENT for another kind of URL.
absl::StatusOr<MetricsSource> HttpMetricsSource(const std::string& url);

/// Reads a server's metrics at both ends of a run and, on a thread of its own, while it goes on.
/// For one thread.
class MetricsScraper {
 public:
  /// `source` must outlive it and is called by one thread at a time.
  MetricsScraper(MetricsSource& source, std::string head, absl::Duration pause = absl::Seconds(1));
  ~MetricsScraper();
  MetricsScraper(const MetricsScraper&) = delete;
  MetricsScraper& operator=(const MetricsScraper&) = delete;

  /// Reads the first page and begins to look for peaks.
  absl::Status Begin();
  /// Reads the last page. Errors are those of the source and of CompareMetrics; FAILED_PRECONDITION
  /// when Begin failed.
  absl::StatusOr<ServerFigures> End();

 private:
  absl::StatusOr<MetricsPage> Read();
  void Watch();
  void StopWatching();

  MetricsSource& source_;
  const std::string head_;
  const absl::Duration pause_;
  std::optional<MetricsPage> before_;  ///< Nothing after a Begin that failed.
  absl::Time begun_;
  ServerPeaks peaks_;  ///< The watching thread's while there is one.
  std::thread watcher_;

  absl::Mutex mutex_;
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace logprobd::client
