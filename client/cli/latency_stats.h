#pragma once

#include <cstdint>
#include <vector>

namespace logprobd::client {

/// Latencies in seconds, summed up.
struct LatencyStats {
  double mean = 0;
  double p50 = 0;
  double p90 = 0;
  double p95 = 0;
  double p99 = 0;
  double max = 0;
};

/// The `percent`th percentile by nearest rank: the least value that at least `percent` % of the
/// values do not exceed. `sorted` rises; 0 when it is empty.
double Percentile(const std::vector<double>& sorted, double percent);

/// Sums up `seconds`, in any order; all 0 when there are none.
LatencyStats SummarizeLatencies(std::vector<double> seconds);

}  // namespace logprobd::client
