#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace logprobd::client {

/// Every latency of a run in bounded memory: counts in buckets of 1/128 of a power of two, so that
/// a percentile is at most 0.8 % above the true one. Resolution 1 ns, range to about 73 minutes;
/// longer ones count as that. At most 37 KB, none before the first value. Not thread-safe.
class LatencyHistogram {
 public:
  /// A negative latency counts as 0.
  void Record(double seconds);
  void Merge(const LatencyHistogram& other);

  int64_t count() const { return count_; }
  /// Exact; 0 of nothing.
  double mean() const;
  double min() const;
  double max() const;

  /// The nearest rank's bucket's upper end, never above max(): at least `percent` % of the values
  /// do not exceed it. 0 of nothing.
  double Percentile(double percent) const;

  /// Calls `visit` with each bucket that holds values, rising: values in [begin, end) seconds.
  void ForEachBucket(
      const std::function<void(double begin, double end, int64_t count)>& visit) const;

 private:
  std::vector<int64_t> counts_;  ///< Empty, or one for each bucket.
  int64_t count_ = 0;
  double sum_seconds_ = 0;
  double min_seconds_ = 0;
  double max_seconds_ = 0;
};

}  // namespace logprobd::client
