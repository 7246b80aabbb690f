#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/base/head_info.h"
#include "server/base/score_request.h"
#include "server/metrics/families.h"
#include "server/metrics/metrics.h"

namespace logprobd {

inline constexpr size_t kNumMethods = 4;
inline constexpr size_t kNumCodes = 17;  ///< gRPC status codes 0 to 16.
inline constexpr size_t kNumTransports = 3;
inline constexpr size_t kNumSwapResults = 5;

/// Label values, indexed by Metrics::Transport.
inline constexpr std::array<const char*, kNumTransports> kTransportNames = {"tcp", "shm",
                                                                            "cuda_ipc"};

/// The series of one head. They are looked up once, so that recording is a few atomic additions.
struct HeadSeries {
  std::array<std::array<prometheus::Counter*, kNumCodes>, kNumMethods> requests{};
  /// Indexed by method and transport. A series is null until its first use, except that of TCP.
  std::array<std::array<std::atomic<prometheus::Histogram*>, kNumTransports>, kNumMethods>
      durations{};

  /// All members from here on are null for the "unknown" head, which queues and scores nothing.
  prometheus::Counter* rows_scored = nullptr;
  prometheus::Counter* rows_ignored = nullptr;
  prometheus::Counter* rows_nonfinite = nullptr;
  prometheus::Histogram* batch_rows = nullptr;
  prometheus::Histogram* batch_requests = nullptr;
  std::array<prometheus::Gauge*, kNumPriorities> queue_rows{};
  std::array<prometheus::Gauge*, kNumPriorities> queue_bytes{};
  std::array<prometheus::Gauge*, kNumPriorities> queue_requests{};
  prometheus::Gauge* queue_oldest_age = nullptr;
  prometheus::Gauge* weights_version = nullptr;
  prometheus::Gauge* ready = nullptr;
  prometheus::Gauge* replicas_healthy = nullptr;
  prometheus::Gauge* replicas_failed = nullptr;
  prometheus::Histogram* weights_load = nullptr;
  std::array<prometheus::Counter*, kNumSwapResults> weights_swaps{};
};

/// All metric families that have a head label. The series are created at construction, except those
/// of head_info and the durations of transports other than TCP.
class HeadMetrics {
 public:
  HeadMetrics(prometheus::Registry& registry, const std::vector<std::string>& heads);

  /// Returns the series of `head` for request counts, or those of "unknown" if no head of that name
  /// is configured.
  HeadSeries& Any(absl::string_view head);
  /// Returns the series of a configured head, or null for any other name.
  HeadSeries* Configured(absl::string_view head);

  void ObserveRequest(Metrics::Method method, absl::string_view head, Metrics::Transport transport,
                      double seconds);
  /// Sets head_info and the weights' version. Heads that are not configured are skipped.
  void SetInfo(const HeadInfo& info);
  /// Returns the sum of queue_bytes over heads and priorities.
  double QueuedBytes() const;

 private:
  void CreateSeries(const std::string& head, bool configured);
  prometheus::Histogram& AddDuration(size_t method, const std::string& head_label,
                                     size_t transport);

  prometheus::Family<prometheus::Counter>& requests_;
  prometheus::Family<prometheus::Histogram>& duration_;
  prometheus::Family<prometheus::Counter>& rows_;
  prometheus::Family<prometheus::Histogram>& batch_rows_;
  prometheus::Family<prometheus::Histogram>& batch_requests_;
  prometheus::Family<prometheus::Gauge>& queue_rows_;
  prometheus::Family<prometheus::Gauge>& queue_bytes_;
  prometheus::Family<prometheus::Gauge>& queue_requests_;
  prometheus::Family<prometheus::Gauge>& queue_oldest_age_;
  prometheus::Family<prometheus::Gauge>& weights_version_;
  prometheus::Family<prometheus::Gauge>& ready_;
  prometheus::Family<prometheus::Gauge>& replicas_;
  prometheus::Family<prometheus::Histogram>& weights_load_;
  prometheus::Family<prometheus::Counter>& weights_swaps_;
  prometheus::Family<prometheus::Gauge>& info_;
  std::map<std::string, HeadSeries, std::less<>> heads_;
  HeadSeries unknown_;
  /// The series of head_info by head; a series is replaced when a label changes.
  absl::Mutex info_mutex_;
  std::map<std::string, prometheus::Gauge*> info_series_ ABSL_GUARDED_BY(info_mutex_);
};

}  // namespace logprobd
