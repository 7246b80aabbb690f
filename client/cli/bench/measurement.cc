#include "client/cli/bench/measurement.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace logprobd::client {
namespace {

// Values below 2^(kSubBits + 1) ns have one bucket each. Above, every power of two has 2^kSubBits
// buckets.
constexpr int kSubBits = 7;
constexpr uint64_t kLinear = uint64_t{1} << (kSubBits + 1);
constexpr int kValueBits = 42;
constexpr uint64_t kValueMax = (uint64_t{1} << kValueBits) - 1;
constexpr size_t kBuckets = kLinear + (size_t{kValueBits - kSubBits - 1} << kSubBits);

size_t BucketOf(uint64_t nanoseconds) {
  if (nanoseconds < kLinear) return nanoseconds;
  const int shift = static_cast<int>(std::bit_width(nanoseconds)) - 1 - kSubBits;
  // The shifted value keeps its leading bit, so its sub-bucket numbers start at 2^kSubBits.
  return (static_cast<size_t>(shift) << kSubBits) + (nanoseconds >> shift);
}

/// Returns the smallest value of a bucket.
uint64_t BucketBegin(size_t bucket) {
  if (bucket < kLinear) return bucket;
  const size_t shift = (bucket >> kSubBits) - 1;
  return (bucket - (shift << kSubBits)) << shift;
}

double Seconds(uint64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

bool Agree(const std::vector<double>& values, double share) {
  double mean = 0;
  for (const double value : values) mean += value / static_cast<double>(values.size());
  return mean > 0 && std::all_of(values.begin(), values.end(), [&](double value) {
           return std::abs(value - mean) <= share * mean;
         });
}

}  // namespace

void LatencyHistogram::Record(double seconds) {
  seconds = std::max(seconds, 0.0);
  if (counts_.empty()) counts_.resize(kBuckets);
  const double nanoseconds = std::min(std::round(seconds * 1e9), static_cast<double>(kValueMax));
  ++counts_[BucketOf(static_cast<uint64_t>(nanoseconds))];
  max_seconds_ = std::max(max_seconds_, seconds);
  sum_seconds_ += seconds;
  ++count_;
}

void LatencyHistogram::Merge(const LatencyHistogram& other) {
  if (other.count_ == 0) return;
  if (counts_.empty()) counts_.resize(kBuckets);
  for (size_t i = 0; i < kBuckets; ++i) counts_[i] += other.counts_[i];
  max_seconds_ = std::max(max_seconds_, other.max_seconds_);
  sum_seconds_ += other.sum_seconds_;
  count_ += other.count_;
}

double LatencyHistogram::mean() const {
  return count_ == 0 ? 0 : sum_seconds_ / static_cast<double>(count_);
}

double LatencyHistogram::Percentile(double percent) const {
  const double rank = std::ceil(percent / 100 * static_cast<double>(count_));
  const auto target =
      std::clamp<int64_t>(static_cast<int64_t>(rank), 1, std::max(count_, int64_t{1}));
  int64_t seen = 0;
  for (size_t bucket = 0; bucket < counts_.size(); ++bucket) {
    seen += counts_[bucket];
    if (seen >= target) return std::min(Seconds(BucketBegin(bucket + 1)), max_seconds_);
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

void SizeStats::Merge(const SizeStats& other) {
  rows += other.rows;
  errors += other.errors;
  latency.Merge(other.latency);
  for (const auto& [transport, count] : other.transports) transports[transport] += count;
}

std::string SizeStats::TransportText() const {
  std::vector<std::pair<int64_t, Transport>> used;
  for (const auto& [transport, count] : transports) used.emplace_back(-count, transport);
  std::sort(used.begin(), used.end());
  return absl::StrJoin(used, "+", [](std::string* out, const auto& each) {
    absl::StrAppend(out, TransportName(each.second));
  });
}

void LateSends::Merge(const LateSends& other) {
  by_generator += other.by_generator;
  by_server += other.by_server;
  unsent += other.unsent;
  generator_seconds_max = std::max(generator_seconds_max, other.generator_seconds_max);
  server_seconds_max = std::max(server_seconds_max, other.server_seconds_max);
}

SizeStats Interval::Total() const {
  SizeStats total;
  for (const SizeStats& size : sizes) total.Merge(size);
  return total;
}

void Interval::Append(const Interval& other) {
  if (sizes.size() < other.sizes.size()) sizes.resize(other.sizes.size());
  for (size_t i = 0; i < other.sizes.size(); ++i) sizes[i].Merge(other.sizes[i]);
  seconds += other.seconds;
  late.Merge(other.late);
  first_error.Update(other.first_error);
}

LoadRecorder::Part& LoadRecorder::OwnPart() {
  static std::atomic<size_t> num_threads{0};
  thread_local const size_t number = num_threads.fetch_add(1, std::memory_order_relaxed);
  return parts_[number % kParts];
}

SizeStats& LoadRecorder::StatsOf(Part& part, size_t size) {
  if (part.found.sizes.empty()) part.found.sizes.resize(num_sizes_);
  return part.found.sizes[size];
}

void LoadRecorder::RecordAnswer(size_t size, int64_t rows, double seconds, Transport transport) {
  Part& part = OwnPart();
  const absl::MutexLock lock(&part.mutex);
  SizeStats& stats = StatsOf(part, size);
  stats.rows += rows;
  stats.latency.Record(seconds);
  ++stats.transports[transport];
}

void LoadRecorder::RecordFailure(size_t size, const absl::Status& status) {
  Part& part = OwnPart();
  const absl::MutexLock lock(&part.mutex);
  ++StatsOf(part, size).errors;
  part.found.first_error.Update(status);
}

void LoadRecorder::RecordLate(double seconds, bool by_server) {
  Part& part = OwnPart();
  const absl::MutexLock lock(&part.mutex);
  LateSends& late = part.found.late;
  ++(by_server ? late.by_server : late.by_generator);
  double& longest = by_server ? late.server_seconds_max : late.generator_seconds_max;
  longest = std::max(longest, seconds);
}

void LoadRecorder::RecordUnsent(int64_t count) {
  Part& part = OwnPart();
  const absl::MutexLock lock(&part.mutex);
  part.found.late.unsent += count;
}

Interval LoadRecorder::Take() {
  Interval all;
  all.sizes.resize(num_sizes_);
  for (Part& part : parts_) {
    const absl::MutexLock lock(&part.mutex);
    all.Append(std::exchange(part.found, {}));
  }
  return all;
}

void WindowSeries::Add(Interval window) {
  const SizeStats total = window.Total();
  figures_.push_back(
      {.begin_seconds = window.begin_seconds,
       .seconds = window.seconds,
       .requests = total.requests(),
       .errors = total.errors,
       .rows_per_second = window.seconds > 0 ? static_cast<double>(total.rows) / window.seconds : 0,
       .latency_seconds = total.latency.Percentile(criterion_.percentile)});
  all_.Append(window);
  last_.push_back(std::move(window));
  if (last_.size() > kWindowsCompared) last_.pop_front();
}

void WindowSeries::AddLateAnswers(Interval answers) {
  answers.seconds = 0;
  for (SizeStats& size : answers.sizes) size.rows = 0;
  all_.Append(answers);
  if (!last_.empty()) last_.back().Append(answers);
}

std::optional<bool> WindowSeries::stable() const {
  if (figures_.size() < kWindowsCompared) return std::nullopt;
  std::vector<double> throughput;
  std::vector<double> latency;
  for (auto window = figures_.end() - kWindowsCompared; window != figures_.end(); ++window) {
    throughput.push_back(window->rows_per_second);
    latency.push_back(window->latency_seconds);
  }
  return Agree(throughput, criterion_.share) && Agree(latency, criterion_.share);
}

Interval WindowSeries::LastWindows() const {
  Interval joined;
  for (const Interval& window : last_) joined.Append(window);
  if (!last_.empty()) joined.begin_seconds = last_.front().begin_seconds;
  return joined;
}

}  // namespace logprobd::client
