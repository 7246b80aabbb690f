#include "server/metrics/snapshot.h"

#include <prometheus/metric_family.h>

#include <algorithm>
#include <cstddef>

#include "absl/algorithm/container.h"

namespace logprobd {
namespace {

HistogramCounts CountsOf(const prometheus::ClientMetric::Histogram& histogram) {
  HistogramCounts counts;
  counts.sum = histogram.sample_sum;
  for (const prometheus::ClientMetric::Bucket& bucket : histogram.bucket) {
    counts.upper_bounds.push_back(bucket.upper_bound);
    counts.cumulative.push_back(bucket.cumulative_count);
  }
  return counts;
}

bool HasLabels(const MetricsSnapshot::Labels& have, const MetricsSnapshot::Labels& required) {
  return absl::c_all_of(required,
                        [&have](const auto& label) { return absl::c_linear_search(have, label); });
}

}  // namespace

double HistogramCounts::Quantile(double q) const {
  if (count() == 0) return 0;
  const double rank = q * static_cast<double>(count());
  const auto found = absl::c_find_if(
      cumulative, [rank](uint64_t below) { return static_cast<double>(below) >= rank; });
  const auto bucket = static_cast<size_t>(found - cumulative.begin());
  if (bucket + 1 >= upper_bounds.size()) {
    return upper_bounds.size() < 2 ? 0 : upper_bounds[upper_bounds.size() - 2];
  }
  const double lower = bucket == 0 ? 0 : upper_bounds[bucket - 1];
  const uint64_t before = bucket == 0 ? 0 : cumulative[bucket - 1];
  const auto inside = static_cast<double>(cumulative[bucket] - before);
  const double share = inside == 0 ? 0 : (rank - static_cast<double>(before)) / inside;
  return lower + (upper_bounds[bucket] - lower) * share;
}

void HistogramCounts::Add(const HistogramCounts& other) {
  if (upper_bounds.empty()) {
    *this = other;
    return;
  }
  for (size_t i = 0; i < std::min(cumulative.size(), other.cumulative.size()); ++i) {
    cumulative[i] += other.cumulative[i];
  }
  sum += other.sum;
}

HistogramCounts HistogramCounts::Since(const HistogramCounts& earlier) const {
  HistogramCounts later = *this;
  for (size_t i = 0; i < std::min(cumulative.size(), earlier.cumulative.size()); ++i) {
    later.cumulative[i] -= std::min(later.cumulative[i], earlier.cumulative[i]);
  }
  later.sum = std::max(0.0, sum - earlier.sum);
  return later;
}

MetricsSnapshot::MetricsSnapshot(const std::vector<prometheus::MetricFamily>& families) {
  for (const prometheus::MetricFamily& family : families) {
    std::vector<Series>& all = families_[family.name];
    for (const prometheus::ClientMetric& metric : family.metric) {
      Series series;
      for (const auto& label : metric.label) series.labels.emplace_back(label.name, label.value);
      switch (family.type) {
        case prometheus::MetricType::Counter:
          series.value = metric.counter.value;
          break;
        case prometheus::MetricType::Histogram:
          series.histogram = CountsOf(metric.histogram);
          break;
        default:
          series.value = metric.gauge.value;
      }
      all.push_back(std::move(series));
    }
  }
}

double MetricsSnapshot::Sum(absl::string_view name, const Labels& labels) const {
  double sum = 0;
  if (const auto found = families_.find(name); found != families_.end()) {
    for (const Series& series : found->second) {
      sum += HasLabels(series.labels, labels) ? series.value : 0;
    }
  }
  return sum;
}

HistogramCounts MetricsSnapshot::Histogram(absl::string_view name, const Labels& labels) const {
  HistogramCounts counts;
  if (const auto found = families_.find(name); found != families_.end()) {
    for (const Series& series : found->second) {
      if (HasLabels(series.labels, labels)) counts.Add(series.histogram);
    }
  }
  return counts;
}

std::vector<std::string> MetricsSnapshot::LabelValues(absl::string_view name,
                                                      absl::string_view label) const {
  std::vector<std::string> values;
  if (const auto found = families_.find(name); found != families_.end()) {
    for (const Series& series : found->second) {
      for (const auto& [label_name, value] : series.labels) {
        if (label_name == label && !absl::c_linear_search(values, value)) values.push_back(value);
      }
    }
  }
  return values;
}

}  // namespace logprobd
