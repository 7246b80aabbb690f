#include "client/cli/bench/latency_histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace logprobd::client {
namespace {

// Values below 2^(kSubBits + 1) ns have a bucket each; above, every power of two has 2^kSubBits.
constexpr int kSubBits = 7;
constexpr uint64_t kLinear = uint64_t{1} << (kSubBits + 1);
constexpr int kValueBits = 42;
constexpr uint64_t kValueMax = (uint64_t{1} << kValueBits) - 1;
constexpr size_t kBuckets = kLinear + (size_t{kValueBits - kSubBits - 1} << kSubBits);

size_t BucketOf(uint64_t nanoseconds) {
  if (nanoseconds < kLinear) return nanoseconds;
  const int shift = static_cast<int>(std::bit_width(nanoseconds)) - 1 - kSubBits;
  // The leading bit stays: sub-buckets count from 2^kSubBits.
  return (static_cast<size_t>(shift) << kSubBits) + (nanoseconds >> shift);
}

/// The least value of a bucket.
uint64_t BucketBegin(size_t bucket) {
  if (bucket < kLinear) return bucket;
  const size_t shift = (bucket >> kSubBits) - 1;
  return (bucket - (shift << kSubBits)) << shift;
}

double Seconds(uint64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

}  // namespace

void LatencyHistogram::Record(double seconds) {
  seconds = std::max(seconds, 0.0);
  if (counts_.empty()) counts_.resize(kBuckets);
  const double nanoseconds = std::min(std::round(seconds * 1e9), static_cast<double>(kValueMax));
  ++counts_[BucketOf(static_cast<uint64_t>(nanoseconds))];
  min_seconds_ = count_ == 0 ? seconds : std::min(min_seconds_, seconds);
  max_seconds_ = std::max(max_seconds_, seconds);
  sum_seconds_ += seconds;
  ++count_;
}

void LatencyHistogram::Merge(const LatencyHistogram& other) {
  if (other.count_ == 0) return;
  if (counts_.empty()) counts_.resize(kBuckets);
  for (size_t i = 0; i < kBuckets; ++i) counts_[i] += other.counts_[i];
  min_seconds_ = count_ == 0 ? other.min_seconds_ : std::min(min_seconds_, other.min_seconds_);
  max_seconds_ = std::max(max_seconds_, other.max_seconds_);
  sum_seconds_ += other.sum_seconds_;
  count_ += other.count_;
}

double LatencyHistogram::mean() const {
  return count_ == 0 ? 0 : sum_seconds_ / static_cast<double>(count_);
}

double LatencyHistogram::min() const { return min_seconds_; }

double LatencyHistogram::max() const { return max_seconds_; }

double LatencyHistogram::Percentile(double percent) const {
  const double rank = std::ceil(percent / 100 * static_cast<double>(count_));
  const auto wanted =
      std::clamp<int64_t>(static_cast<int64_t>(rank), 1, std::max(count_, int64_t{1}));
  int64_t seen = 0;
  for (size_t bucket = 0; bucket < counts_.size(); ++bucket) {
    seen += counts_[bucket];
    if (seen >= wanted) return std::min(Seconds(BucketBegin(bucket + 1)), max_seconds_);
  }
  return max_seconds_;
}

void LatencyHistogram::ForEachBucket(
    const std::function<void(double, double, int64_t)>& visit) const {
  for (size_t bucket = 0; bucket < counts_.size(); ++bucket) {
    if (counts_[bucket] > 0) {
      visit(Seconds(BucketBegin(bucket)), Seconds(BucketBegin(bucket + 1)), counts_[bucket]);
    }
  }
}

}  // namespace logprobd::client
