#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

// prometheus-cpp stays out of our headers.
namespace prometheus {
struct MetricFamily;
}  // namespace prometheus

namespace logprobd {

/// What a histogram holds. Histograms of the same family have the same buckets.
struct HistogramCounts {
  std::vector<double> upper_bounds;  ///< [num_buckets], ascending; the last is +Inf.
  std::vector<uint64_t> cumulative;  ///< [num_buckets], observations up to each bound.
  double sum = 0;                    ///< Of the observed values.

  uint64_t count() const { return cumulative.empty() ? 0 : cumulative.back(); }
  double mean() const { return count() == 0 ? 0 : sum / static_cast<double>(count()); }
  /// The value below which a share `q` (0 to 1) of the observations lie, interpolated in its bucket
  /// as Prometheus does; the largest finite bound for what lies beyond it. 0 without observations.
  double Quantile(double q) const;

  void Add(const HistogramCounts& other);
  /// What came after `earlier`, which is the same histogram at an earlier time, or empty.
  HistogramCounts Since(const HistogramCounts& earlier) const;
};

/// All metrics at one time, by the names under which they are served.
class MetricsSnapshot {
 public:
  /// Labels that a series must have, by name and value; it may have others.
  using Labels = std::vector<std::pair<std::string, std::string>>;

  MetricsSnapshot() = default;
  explicit MetricsSnapshot(const std::vector<prometheus::MetricFamily>& families);

  /// Sum over the counters or gauges of family `name` that have `labels`; 0 where there is none.
  double Sum(absl::string_view name, const Labels& labels = {}) const;
  /// The same of histograms.
  HistogramCounts Histogram(absl::string_view name, const Labels& labels = {}) const;
  /// The values that `label` has in family `name`, each once, in the order of the series.
  std::vector<std::string> LabelValues(absl::string_view name, absl::string_view label) const;

 private:
  struct Series {
    Labels labels;
    double value = 0;
    HistogramCounts histogram;  ///< Empty for counters and gauges.
  };

  std::map<std::string, std::vector<Series>, std::less<>> families_;
};

}  // namespace logprobd
