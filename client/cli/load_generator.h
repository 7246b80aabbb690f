#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cli/latency_stats.h"
#include "client/cli/workload.h"
#include "client/cpp/client.h"

namespace logprobd::client {

/// How to load a server with one workload.
struct LoadPlan {
  int64_t concurrency = 1;  ///< Requests always in flight (closed loop).
  /// Requests a second, arriving at random (Poisson) whether or not earlier ones have been
  /// answered; 0: closed loop.
  double request_rate = 0;
  int64_t requests = 0;  ///< To measure; 0: as many as fit into `duration`.
  absl::Duration duration = absl::ZeroDuration();  ///< Used when `requests` is 0.
  int64_t warmup_requests = 0;
  uint64_t seed = 1;  ///< Of the arrivals.
};

/// What was measured under one plan.
struct LoadResult {
  int64_t rows = 0;
  int64_t concurrency = 0;
  double request_rate = 0;
  int64_t requests = 0;  ///< Answered.
  int64_t errors = 0;
  absl::Status first_error;
  double seconds = 0;  ///< From the first request sent to the last answer.
  double rows_per_second = 0;
  double gigabytes_per_second = 0;  ///< Of hidden states, 1e9 bytes.
  /// Of answered requests. In the open loop from the planned time of arrival, so that a stalled
  /// server is not asked less and does not look faster.
  LatencyStats latency;
};

/// Runs the plan. `on_progress` is called about ten times a second with the share done, 0 to 1.
LoadResult RunLoad(Client& client, const Workload& workload, const LoadPlan& plan,
                   const std::function<void(double)>& on_progress);

}  // namespace logprobd::client
