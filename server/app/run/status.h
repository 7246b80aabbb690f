#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/app/options/server_options.h"
#include "server/base/clock.h"
#include "server/base/head_info.h"
#include "server/http/status_page.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// How far a weight has been read, as text for /readyz and as a line on a terminal. Thread-safe.
class LoadProgress {
 public:
  /// If `on_terminal`, draws a line on standard error, at most ten times a second.
  LoadProgress(bool on_terminal, const Clock& clock) : on_terminal_(on_terminal), clock_(clock) {}

  /// Sets the number of bytes read so far and the total.
  void Update(int64_t done_bytes, int64_t total_bytes);
  /// Removes the line from the terminal and resets the progress for the next head.
  void Finish();

  /// Returns text such as "42 % of 296.8 MiB"; empty before the first Update.
  std::string Text() const;

 private:
  const bool on_terminal_;
  const Clock& clock_;
  std::atomic<int64_t> done_bytes_ = 0;
  std::atomic<int64_t> total_bytes_ = 0;
  absl::Mutex mutex_;
  absl::Time next_line_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool has_line_ ABSL_GUARDED_BY(mutex_) = false;
};

/// What the state of the server depends on. The functions below turn it into texts for /readyz, the
/// status page and the service manager.
struct ServerHealth {
  enum class Phase { kLoading, kServing, kStopping };

  struct Head {
    std::string name;
    bool is_loaded = false;
    bool is_ready = false;     ///< See HeadManager::is_ready.
    std::string failure = {};  ///< What has failed, or an empty string.
  };

  Phase phase = Phase::kLoading;
  std::string hang = {};      ///< Why the process is about to end, or an empty string.
  std::string progress = {};  ///< LoadProgress::Text.
  std::vector<Head> heads = {};
};

/// Returns what has failed in the loaded heads, or an empty string if nothing has.
std::string FailureText(const ServerHealth& health);

/// Returns why no head can score, or an empty string if one can.
std::string NotReadyReason(const ServerHealth& health);

/// Returns "ready", together with what has failed.
std::string ReadyText(const ServerHealth& health);

/// Returns the state and the text that is shown for it.
std::pair<ServingState, std::string> StateOf(const ServerHealth& health);

/// Returns warnings about listeners with which others can do harm: those that --insecure opens, and
/// those of gRPC that other hosts may reach if `grpc_version` has GrpcVulnerabilities.
std::vector<std::string> ListenerWarnings(const ServerOptions& options,
                                          absl::string_view grpc_version);

/// The part of the status page that the metrics do not contain.
struct ServerStatus {
  std::string version;
  std::string commit;
  ServingState state = ServingState::kNotReady;
  std::string state_text;
  std::vector<HeadStatus> heads = {};  ///< Without load figures.
  MemoryPlan memory = {};              ///< Memory of all heads.
  std::vector<std::string> warnings = {};
};

/// Fills the status page: a ServerStatus plus figures from the metrics. Rates and latencies cover
/// the last minute, or the time since the start if that is shorter; to this end snapshots of the
/// metrics are taken every few seconds, whether or not anybody views the page. Thread-safe.
class StatusBoard {
 public:
  /// `metrics` and `clock` must outlive the board.
  StatusBoard(Metrics& metrics, const Clock& clock);

  /// Takes a snapshot of the metrics if the last one is at least kSamplePeriod old. It does not
  /// query the GPUs and therefore does not block. Call it more often than every kSamplePeriod.
  void Sample();

  /// Returns the page as of now. Like a scrape of the metrics, it queries the driver about the
  /// GPUs.
  StatusPage Page(const ServerStatus& status);

  static constexpr absl::Duration kWindow = absl::Seconds(60);
  static constexpr absl::Duration kSamplePeriod = absl::Seconds(5);

 private:
  struct Sampled {
    absl::Time time;
    MetricsSnapshot metrics;
  };

  /// Returns the sample taken one window before `now`, or the oldest one.
  Sampled Baseline(absl::Time now) const;

  Metrics& metrics_;
  const Clock& clock_;
  const absl::Time start_;
  mutable absl::Mutex mutex_;
  /// Oldest first, never empty: the newest sample that is a window old, and all later ones.
  std::deque<Sampled> samples_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
