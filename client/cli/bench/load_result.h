#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/bench/latency_histogram.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// Requests of one size, or of all sizes together.
struct SizeStats {
  int64_t rows = 0;  ///< Of all its answered requests.
  int64_t errors = 0;
  /// Of answered requests. In the open loop from the planned time of arrival, so that a stalled
  /// server is not asked less and does not look faster.
  LatencyHistogram latency;
  /// Answered requests by how most of their rows travelled.
  std::map<Transport, int64_t> transports;

  int64_t requests() const { return latency.count(); }
  /// "shm"; the most used first where there were several: "shm+tcp". Empty without an answer.
  std::string TransportText() const;
  void Merge(const SizeStats& other);
};

/// Requests of an open loop that left more than a millisecond after their planned time.
struct LateSends {
  /// The generator could not keep up, although the server had answered what it was sent.
  int64_t by_generator = 0;
  double generator_seconds_max = 0;
  /// As many requests as may be in flight were unanswered, or a backlog of such a time was worked
  /// off: the rate is beyond the server.
  int64_t by_server = 0;
  double server_seconds_max = 0;
  /// Due within a run of a given time that was over before they could be sent.
  int64_t unsent = 0;

  void Merge(const LateSends& other);
};

/// What was found between two moments.
struct Interval {
  double begin_seconds = 0;      ///< From the start of measuring.
  double seconds = 0;            ///< Length.
  std::vector<SizeStats> sizes;  ///< As RowMix::sizes.
  LateSends late;
  absl::Status first_error;

  SizeStats Total() const;
  /// A count as a rate; 0 of no time.
  double PerSecond(int64_t count) const {
    return seconds > 0 ? static_cast<double>(count) / seconds : 0;
  }
  /// Adds what `other`, which follows this, found; its time too.
  void Append(const Interval& other);
};

/// A window of the run as the stability criterion sees it.
struct WindowFigures {
  double begin_seconds = 0;
  double seconds = 0;
  int64_t requests = 0;
  int64_t errors = 0;
  double rows_per_second = 0;
  double latency_seconds = 0;  ///< At LoadPlan::stability_percentile.
};

/// What was measured under one plan.
struct LoadMeasurement {
  /// The whole run, or its last windows where it ended as stable (or as never stable).
  Interval measured;
  std::vector<WindowFigures> windows;  ///< The whole run's, in order.
  /// Whether the last windows agree; nothing where there were too few.
  std::optional<bool> stable;
  int64_t inflight_max = 0;  ///< Most requests that could be unanswered at once.
};

}  // namespace logprobd::client
