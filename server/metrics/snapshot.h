#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

// This header exposes nothing of prometheus-cpp except this name.
namespace prometheus {
struct MetricFamily;
}  // namespace prometheus

namespace logprobd {

/// The contents of a histogram. All histograms of a family have the same buckets.
struct HistogramCounts {
  std::vector<double> upper_bounds;  ///< [num_buckets], ascending; the last is +Inf.
  std::vector<uint64_t> cumulative;  ///< [num_buckets], number of observations up to each bound.
  double sum = 0;                    ///< Sum of the observed values.

  uint64_t count() const { return cumulative.empty() ? 0 : cumulative.back(); }
  double mean() const { return count() == 0 ? 0 : sum / static_cast<double>(count()); }
  /// Returns the `q` quantile (0 to 1), interpolated within its bucket as Prometheus does. Returns
  /// the largest finite bound if the quantile lies beyond it, and 0 if there are no observations.
  double Quantile(double q) const;

  /// Adds the observations of `other`, which has the same buckets.
  void Add(const HistogramCounts& other);
  /// Returns the observations since `earlier`, which is either the same histogram at an earlier
  /// time or an empty one.
  HistogramCounts Since(const HistogramCounts& earlier) const;
};

/// The values of all metrics at one time, by the names under which they are served.
class MetricsSnapshot {
 public:
  /// Labels that a series must have, as pairs of name and value. It may have other labels too.
  using Labels = std::vector<std::pair<std::string, std::string>>;

  MetricsSnapshot() = default;
  explicit MetricsSnapshot(const std::vector<prometheus::MetricFamily>& families);

  /// Returns the sum of the counters or gauges of family `name` that have `labels`, or 0 if there
  /// are none.
  double Sum(absl::string_view name, const Labels& labels = {}) const;
  /// Returns the sum of the histograms of family `name` that have `labels`.
  HistogramCounts Histogram(absl::string_view name, const Labels& labels = {}) const;
  /// Returns the distinct values of `label` in family `name`, in the order of the series.
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
