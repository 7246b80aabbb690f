#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// A histogram of all latencies of a run in bounded memory. Its buckets are 1/128 of a power of two
/// wide, so that a percentile is at most 0.8 % above the true one. The resolution is 1 ns and the
/// range is about 73 minutes; a longer latency counts as the longest one. The histogram takes at
/// most 37 KB, and no memory before the first value. Not thread-safe.
class LatencyHistogram {
 public:
  /// Records a latency; a negative one counts as 0.
  void Record(double seconds);
  void Merge(const LatencyHistogram& other);

  int64_t count() const { return count_; }
  /// Returns the exact mean or maximum, or 0 if there is no value.
  double mean() const;
  double max() const { return max_seconds_; }

  /// Returns the upper end of the bucket of the nearest rank, but never more than max(): at least
  /// `percent` % of the values do not exceed it. Returns 0 if there is no value.
  double Percentile(double percent) const;

  /// Calls `visit` with each bucket that holds values, in ascending order. A bucket holds the
  /// values in [begin, end) seconds.
  void ForEachBucket(
      const std::function<void(double begin, double end, int64_t count)>& visit) const;

 private:
  std::vector<int64_t> counts_;  ///< Count of each bucket; empty before the first value.
  int64_t count_ = 0;
  double sum_seconds_ = 0;
  double max_seconds_ = 0;
};

/// Requests of one size, or of all sizes together.
struct SizeStats {
  int64_t rows = 0;  ///< Rows of all answered requests.
  int64_t errors = 0;
  /// Latencies of answered requests. An open loop measures them from the planned time of arrival,
  /// so that a stalled server, which is sent fewer requests, does not look faster.
  LatencyHistogram latency;
  /// Number of answered requests by the transport of most of their rows.
  std::map<Transport, int64_t> transports;

  int64_t requests() const { return latency.count(); }
  /// Returns "shm", or "shm+tcp" with the most used transport first. The text is empty if there is
  /// no answer.
  std::string TransportText() const;
  void Merge(const SizeStats& other);
};

/// Requests of an open loop that were sent more than a millisecond after their planned time.
struct LateSends {
  /// Requests that were late because the generator could not keep up, although the server had
  /// answered its requests.
  int64_t by_generator = 0;
  double generator_seconds_max = 0;
  /// Requests that were late because the maximum number of requests was in flight, or because the
  /// backlog of such a time remained: the rate exceeds what the server can do.
  int64_t by_server = 0;
  double server_seconds_max = 0;
  /// Requests that were due but not sent before a run of a given duration ended.
  int64_t unsent = 0;

  void Merge(const LateSends& other);
};

/// The measurements between two points in time.
struct Interval {
  double begin_seconds = 0;      ///< Time since the start of measuring.
  double seconds = 0;            ///< Length of the interval.
  std::vector<SizeStats> sizes;  ///< One entry per size, in the order of RowMix::sizes.
  LateSends late;
  absl::Status first_error;

  SizeStats Total() const;
  /// Returns `count` per second, or 0 for an interval of no length.
  double PerSecond(int64_t count) const {
    return seconds > 0 ? static_cast<double>(count) / seconds : 0;
  }
  /// Adds the interval that follows this one, with its length.
  void Append(const Interval& other);
};

/// Collects the measurements of a run's threads. The threads share a few parts, each with its own
/// lock; Take merges them. Thread-safe.
class LoadRecorder {
 public:
  explicit LoadRecorder(size_t num_sizes) : num_sizes_(num_sizes) {}

  /// Records an answered request with `rows` rows; `size` is an index into RowMix::sizes.
  void RecordAnswer(size_t size, int64_t rows, double seconds, Transport transport);
  void RecordFailure(size_t size, const absl::Status& status);
  /// Records a request that was sent `seconds` after its planned time.
  void RecordLate(double seconds, bool by_server);
  /// Records `count` requests that were due but not sent before the run ended.
  void RecordUnsent(int64_t count);

  /// Returns everything recorded since the last Take. The caller sets the times of the interval.
  Interval Take();

 private:
  static constexpr size_t kParts = 8;
  struct alignas(64) Part {
    absl::Mutex mutex;
    Interval found ABSL_GUARDED_BY(mutex);
  };

  Part& OwnPart();
  SizeStats& StatsOf(Part& part, size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(part.mutex);

  const size_t num_sizes_;
  std::array<Part, kParts> parts_;
};

/// The figures of one window of a run, which decide whether the run is stable.
struct WindowFigures {
  double begin_seconds = 0;
  double seconds = 0;
  int64_t requests = 0;
  int64_t errors = 0;
  double rows_per_second = 0;
  double latency_seconds = 0;  ///< Latency at the percentile of Criterion.
};

/// The windows of a run. The run is stable when throughput and latency of the last three windows
/// each lie within a share of their mean. Not thread-safe.
class WindowSeries {
 public:
  static constexpr size_t kWindowsCompared = 3;

  struct Criterion {
    double share = 0.1;      ///< Largest distance from the mean, relative to the mean, > 0.
    double percentile = 50;  ///< Percentile of the compared latency, 0 to 100.
  };
  explicit WindowSeries(const Criterion& criterion) : criterion_(criterion) {}

  /// Adds the window that follows the last one.
  void Add(Interval window);

  /// Adds a remainder that is too short to be a window; it counts for the whole run only.
  void Extend(const Interval& tail) { all_.Append(tail); }

  /// Adds the answers to requests that were in flight at the end of the last window. Their
  /// latencies and errors count, so that requests that hang are visible. Their rows do not count,
  /// since they arrived after the measured time.
  void AddLateAnswers(Interval answers);

  /// Returns whether the run is stable, or nothing for fewer than three windows. A run is not
  /// stable if one of the last three windows has no answers.
  std::optional<bool> stable() const;
  const std::vector<WindowFigures>& figures() const { return figures_; }
  const Interval& all() const { return all_; }
  /// Returns the compared windows as one interval.
  Interval LastWindows() const;

 private:
  const Criterion criterion_;
  std::vector<WindowFigures> figures_;
  std::deque<Interval> last_;  ///< The last windows, at most kWindowsCompared.
  Interval all_;
};

/// The result of running one plan.
struct LoadMeasurement {
  /// The whole run, or its last windows if the run had to become stable.
  Interval measured;
  std::vector<WindowFigures> windows;  ///< All windows of the run, in order.
  /// True if the last windows are stable; absent if there were too few.
  std::optional<bool> stable;
  int64_t inflight_max = 0;  ///< Maximum number of unanswered requests.
};

}  // namespace logprobd::client
