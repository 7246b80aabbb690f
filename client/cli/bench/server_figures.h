#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/bench/prometheus_text.h"

namespace logprobd::client {

/// What a server's metrics say of the time between two pages.
struct ServerFigures {
  struct Stage {
    std::string name;
    int64_t count = 0;
    double mean_seconds = 0;
  };
  struct Gpu {
    std::string name;
    double busy_ratio = 0;  ///< Of the time.
    double teraflops = 0;   ///< 1e12 operations a second.
  };

  double seconds = 0;
  double rows_scored = 0;
  double batches = 0;
  double batch_rows_mean = 0;
  std::vector<Stage> stages;                             ///< In the order of a request's way.
  double queue_rows_peak = 0;                            ///< Of what was seen, once a second.
  std::vector<std::pair<std::string, double>> rejected;  ///< By reason; those that occurred.
  double received_bytes = 0;
  double cpu_seconds = 0;
  double cpu_seconds_per_gigabyte = 0;  ///< Of messages received, 1e9 bytes; 0 of none.
  double resident_bytes_peak = 0;       ///< Of what was seen, once a second.
  std::vector<Gpu> gpus;
};

/// Peaks of gauges while a run goes on.
struct ServerPeaks {
  double queue_rows = 0;
  double resident_bytes = 0;

  void Add(const MetricsPage& page, const std::string& head);
};

/// What happened between two pages of one server, `seconds` apart. ABORTED when the server was
/// started anew between them; INVALID_ARGUMENT when they are not a logprobd's.
absl::StatusOr<ServerFigures> CompareMetrics(const MetricsPage& before, const MetricsPage& after,
                                             const std::string& head, const ServerPeaks& peaks,
                                             double seconds);

}  // namespace logprobd::client
