#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace logprobd::client {

/// The samples of a page in the Prometheus text format, without comments.
class MetricsPage {
 public:
  using Labels = std::map<std::string, std::string>;
  struct Sample {
    std::string name;
    std::string labels;  ///< As on the page, with a comma before each; empty if there are none.
    double value = 0;
  };

  /// Parses a page. Returns INVALID_ARGUMENT with the first line that does not follow the format.
  static absl::StatusOr<MetricsPage> Parse(absl::string_view text);

  /// Returns the sum of the samples of this name whose labels include `labels`, or 0 if there is
  /// none.
  double Sum(absl::string_view name, const Labels& labels = {}) const;
  bool Has(absl::string_view name) const;
  /// Returns the values of a label, which have no special characters, in the samples of this name,
  /// sorted and without duplicates.
  std::vector<std::string> LabelValues(absl::string_view name, const std::string& label) const;

 private:
  std::vector<Sample> samples_;
};

/// Figures of a server for the time between two pages of its metrics.
struct ServerFigures {
  struct Stage {
    std::string name;
    int64_t count = 0;
    double mean_seconds = 0;
  };
  struct Gpu {
    std::string name;
    double busy_ratio = 0;  ///< Share of the time in which the GPU is busy, 0 to 1.
    double teraflops = 0;   ///< 1e12 operations per second.
  };

  double seconds = 0;
  double rows_scored = 0;
  double batches = 0;
  double batch_rows_mean = 0;
  std::vector<Stage> stages;   ///< In the order in which a request passes them.
  double queue_rows_peak = 0;  ///< Largest sampled value; one sample per second.
  std::vector<std::pair<std::string, double>> rejected;  ///< Counts by reason, without zeros.
  double received_bytes = 0;
  double cpu_seconds = 0;
  double cpu_seconds_per_gigabyte = 0;  ///< Per 1e9 bytes of received messages; 0 if none.
  double resident_bytes_peak = 0;       ///< Largest sampled value; one sample per second.
  std::vector<Gpu> gpus;
};

/// Largest values of gauges during a run.
struct ServerPeaks {
  double queue_rows = 0;
  double resident_bytes = 0;

  void Add(const MetricsPage& page, const std::string& head);
};

/// Computes the figures from two pages of one server that were read `seconds` apart. Returns
/// ABORTED if the server restarted between them, and INVALID_ARGUMENT if they are not pages of a
/// logprobd.
absl::StatusOr<ServerFigures> CompareMetrics(const MetricsPage& before, const MetricsPage& after,
                                             const std::string& head, const ServerPeaks& peaks,
                                             double seconds);

/// Returns a page of metrics as text.
using MetricsSource = absl::AnyInvocable<absl::StatusOr<std::string>()>;

/// Returns a source that reads "host:port", "http://host:port" or "http://host:port/path" (default
/// path: /metrics) within five seconds. It presents `token`, unless that is empty, but only to
/// loopback addresses, since it would cross a network in the clear. Returns INVALID_ARGUMENT for
/// another kind of URL.
absl::StatusOr<MetricsSource> HttpMetricsSource(const std::string& url,
                                                const std::string& token = "");

/// Reads a server's metrics at both ends of a run and, on its own thread, once per `pause` in
/// between. Not thread-safe.
class MetricsScraper {
 public:
  /// `source` must outlive the scraper and is called by one thread at a time.
  MetricsScraper(MetricsSource& source, std::string head, absl::Duration pause = absl::Seconds(1));
  ~MetricsScraper();
  MetricsScraper(const MetricsScraper&) = delete;
  MetricsScraper& operator=(const MetricsScraper&) = delete;

  /// Reads the first page and starts to watch for peaks.
  absl::Status Begin();
  /// Reads the last page. Returns the errors of the source and of CompareMetrics, or
  /// FAILED_PRECONDITION if Begin failed.
  absl::StatusOr<ServerFigures> End();

 private:
  absl::StatusOr<MetricsPage> Read();
  void Watch();
  void StopWatching();

  MetricsSource& source_;
  const std::string head_;
  const absl::Duration pause_;
  std::optional<MetricsPage> before_;  ///< Empty if Begin failed.
  absl::Time begin_time_;
  ServerPeaks peaks_;                         ///< Used only by the watching thread while it runs.
  std::optional<absl::Notification> ending_;  ///< Ends the watching; new for each Begin.
  std::thread watcher_;
};

}  // namespace logprobd::client
