#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "client/cli/bench/load_result.h"

namespace logprobd::client {

/// Windows of a run, and whether its figures have settled: throughput and latency of the last three
/// windows each lie within a share of their mean. Not thread-safe.
class WindowSeries {
 public:
  static constexpr size_t kWindowsCompared = 3;

  struct Criterion {
    double share = 0.1;      ///< Largest distance from the mean, relative to it, > 0.
    double percentile = 50;  ///< Of latency, 0 to 100.
  };
  explicit WindowSeries(const Criterion& criterion) : criterion_(criterion) {}

  /// Adds the window that follows the last one.
  void Add(Interval window);

  /// Adds what came after the last window, too short to be one, to the whole run alone.
  void Extend(const Interval& tail) { all_.Append(tail); }

  /// Adds the answers to what was under way at the end of the last window: their latencies and
  /// errors count, or requests that hang would be seen nowhere; their rows came after its time.
  void AddLateAnswers(Interval answers);

  /// Nothing with fewer than three windows; false also where one of them answered nothing.
  std::optional<bool> stable() const;
  const std::vector<WindowFigures>& figures() const { return figures_; }
  const Interval& all() const { return all_; }
  /// The windows compared, as one.
  Interval LastWindows() const;

 private:
  const Criterion criterion_;
  std::vector<WindowFigures> figures_;
  std::deque<Interval> last_;  ///< At most kWindowsCompared.
  Interval all_;
};

}  // namespace logprobd::client
