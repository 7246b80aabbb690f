#include "client/cli/latency_stats.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace logprobd::client {

double Percentile(const std::vector<double>& sorted, double percent) {
  if (sorted.empty()) return 0;
  const double rank = std::ceil(percent / 100 * static_cast<double>(sorted.size()));
  const auto index = static_cast<size_t>(std::max(rank, 1.0)) - 1;
  return sorted[std::min(index, sorted.size() - 1)];
}

LatencyStats SummarizeLatencies(std::vector<double> seconds) {
  if (seconds.empty()) return {};
  std::sort(seconds.begin(), seconds.end());
  return {.mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) /
                  static_cast<double>(seconds.size()),
          .p50 = Percentile(seconds, 50),
          .p90 = Percentile(seconds, 90),
          .p95 = Percentile(seconds, 95),
          .p99 = Percentile(seconds, 99),
          .max = seconds.back()};
}

}  // namespace logprobd::client
