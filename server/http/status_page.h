#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/base/head_info.h"

namespace logprobd {

/// State of a server or a head. kDegraded: it serves but has lost replicas or heads.
enum class ServingState { kReady, kDegraded, kNotReady };

/// Latencies within the page's window. All members but the name are 0 without observations.
struct LatencySummary {
  std::string name;
  uint64_t count = 0;
  double p50_seconds = 0;
  double p90_seconds = 0;
  double p99_seconds = 0;
};

/// A head and its load. Rates cover the page's window.
struct HeadStatus {
  HeadInfo info;
  ServingState state = ServingState::kNotReady;
  std::string state_text;
  std::vector<bool> is_replica_healthy = {};  ///< [num_replicas]; empty: not yet known.
  double requests_per_second = 0;
  double rows_per_second = 0;    ///< Rows scored.
  double faults_per_second = 0;  ///< Calls that failed through the server's fault.
  double batch_rows_mean = 0;
  uint64_t nonfinite_rows = 0;  ///< Total since the server started.
  int64_t queue_rows = 0;
  int64_t queue_rows_max = 0;  ///< 0: unknown.
  int64_t queue_requests = 0;
  double queue_oldest_seconds = 0;
  LatencySummary latency;  ///< Latency of scoring calls.
};

/// A GPU and its load.
struct GpuStatus {
  int gpu = 0;  ///< CUDA ordinal.
  bool has_readings = false;
  double utilization_ratio = 0;
  double power_watts = 0;
  double sm_clock_hertz = 0;
  std::vector<std::string> throttled = {};  ///< Reasons that lower the clocks now.
  double tflops_per_second = 0;
  double busy_ratio = 0;  ///< Share of the window during which batches were in kernels.
};

/// Memory in one place (the host or a GPU) that serves one purpose.
struct MemoryPart {
  std::string kind;
  int64_t bytes = 0;
  int64_t peak_bytes = 0;  ///< Largest value since the server started; 0: not measured.
  bool is_bound = false;   ///< `bytes` is an upper bound, not a reserved size.
};

struct MemoryPlace {
  std::string place;  ///< "host" or, for example, "gpu0".
  std::vector<MemoryPart> parts = {};
};

/// Everything that the status page shows.
struct StatusPage {
  std::string version;
  std::string commit;
  ServingState state = ServingState::kNotReady;
  std::string state_text;
  double uptime_seconds = 0;
  double window_seconds = 0;  ///< Length of the window of rates and latencies.
  double received_bytes_per_second = 0;
  double sent_bytes_per_second = 0;
  double refused_per_second = 0;  ///< Requests refused before they were queued.
  int64_t inflight_bytes = 0;
  int64_t inflight_bytes_max = 0;
  std::vector<HeadStatus> heads = {};
  std::vector<LatencySummary> stages = {};
  std::vector<GpuStatus> gpus = {};
  std::vector<MemoryPlace> memory = {};
  /// Properties of the process as pairs of name and value.
  std::vector<std::pair<std::string, std::string>> process = {};
  std::vector<std::string> warnings = {};
};

/// Renders the page as self-contained HTML: style and drawings are inline, and there is no script.
/// The browser reloads it every `refresh_seconds`; 0: never.
std::string RenderStatusPage(const StatusPage& page, int refresh_seconds);

/// Renders the latencies of the page's heads and stages as a plain-text table.
std::string RenderLatencyText(const StatusPage& page);

/// Escapes `text` for use as the content of an element or of a quoted attribute.
std::string EscapeHtml(absl::string_view text);

/// Formats a duration: "780 us" (with a micro sign), "12.3 ms", "4.56 s", "3 min 20 s", "2 h 5
/// min", "3 d 4 h".
std::string HumanSeconds(double seconds);

/// Formats a number: "0", "0.25", "7.5", "12,345", "1.25 M", "3.10 G".
std::string HumanNumber(double number);

/// Formats a ratio as a percentage: "42%", "0.8%".
std::string HumanShare(double ratio);

}  // namespace logprobd
