#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/base/head_info.h"

namespace logprobd {

/// How a server or a head stands: kDegraded serves, but has lost something.
enum class ServingState { kReady, kDegraded, kNotReady };

/// How long something took, of the page's window. All 0 without observations.
struct LatencySummary {
  std::string name;
  uint64_t count = 0;
  double mean_seconds = 0;
  double p50_seconds = 0;
  double p90_seconds = 0;
  double p99_seconds = 0;
};

/// A head and its load. Rates are of the page's window.
struct HeadStatus {
  HeadInfo info;
  ServingState state = ServingState::kNotReady;
  std::string state_text;
  std::vector<bool> is_replica_healthy = {};  ///< [num_replicas]; empty: not known yet.
  double requests_per_second = 0;
  double rows_per_second = 0;    ///< Scored.
  double faults_per_second = 0;  ///< Calls that ended neither OK nor through the client.
  double batch_rows_mean = 0;
  uint64_t nonfinite_rows = 0;  ///< Since the start.
  int64_t queue_rows = 0;
  int64_t queue_rows_max = 0;  ///< 0: not known.
  int64_t queue_requests = 0;
  double queue_oldest_seconds = 0;
  LatencySummary latency;  ///< Of scoring calls.
};

/// A GPU and its load.
struct GpuStatus {
  int gpu = 0;  ///< CUDA ordinal.
  bool has_readings = false;
  double utilization_ratio = 0;
  double power_watts = 0;
  double sm_clock_hertz = 0;
  std::vector<std::string> throttled = {};  ///< Reasons that hold now.
  double tflops_per_second = 0;
  double busy_ratio = 0;  ///< Share of the window in which batches were in kernels.
};

/// What a place's memory holds.
struct MemoryPart {
  std::string kind;
  int64_t bytes = 0;
  int64_t peak_bytes = 0;  ///< Since the start; 0: not measured.
  bool is_bound = false;   ///< Not reserved: it may become so much.
};

struct MemoryPlace {
  std::string place;  ///< "host", "gpu0".
  std::vector<MemoryPart> parts = {};
};

/// All that the page shows.
struct StatusPage {
  std::string version;
  std::string commit;
  ServingState state = ServingState::kNotReady;
  std::string state_text;
  double uptime_seconds = 0;
  double window_seconds = 0;  ///< Time over which rates and latencies are taken.
  double received_bytes_per_second = 0;
  double sent_bytes_per_second = 0;
  double refused_per_second = 0;  ///< Requests refused before they were queued.
  int64_t inflight_bytes = 0;
  int64_t inflight_bytes_max = 0;
  std::vector<HeadStatus> heads = {};
  std::vector<LatencySummary> stages = {};
  std::vector<GpuStatus> gpus = {};
  std::vector<MemoryPlace> memory = {};
  /// Name and value.
  std::vector<std::pair<std::string, std::string>> process = {};
  std::vector<std::string> warnings = {};
};

/// The page as HTML that asks for nothing else: style and drawings are in it, there is no script.
/// It asks the browser to load it again every `refresh_seconds`; 0: never.
std::string RenderStatusPage(const StatusPage& page, int refresh_seconds);

}  // namespace logprobd
