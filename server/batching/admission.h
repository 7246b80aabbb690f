#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Measures how fast the replicas together take rows from the queue. Provides two rates: a running
/// mean for retry hints, and the best rate of the last seconds for refusing requests that cannot
/// meet their deadline. A stall slows only the mean, because it must not make the server refuse
/// work that it could do. Not thread-safe.
///
/// Each batch measures the replica that scored it; all replicas are assumed to be equally fast. The
/// time between the ends of any two batches is not used: batches of different replicas may end
/// together, and a replica without work would make the others look slow.
class DrainRate {
 public:
  static constexpr absl::Duration kRetryAfterMin = absl::Milliseconds(1);
  static constexpr absl::Duration kRetryAfterMax = absl::Seconds(10);
  /// Retry hint before anything has been measured.
  static constexpr absl::Duration kRetryAfterUnmeasured = absl::Milliseconds(50);
  /// The best rate covers at least the last kMemory and at most three times that.
  static constexpr absl::Duration kMemory = absl::Seconds(5);

  /// Batches of fewer than `representative_rows` rows never slow the estimates: a batch of one row
  /// takes nearly as long as a batch of a hundred and would make the engine look slow.
  explicit DrainRate(int64_t representative_rows) : representative_rows_(representative_rows) {}

  /// Sets how many replicas share the work from now on, >= 1. The initial value is 1.
  void set_num_replicas(int num_replicas) { num_replicas_ = num_replicas; }

  /// Records a batch that replica number `replica` had from `started` to `ended`. The batch is
  /// assumed to have used the replica alone since the end of the replica's previous batch.
  void AddBatch(int64_t rows, absl::Time started, absl::Time ended, int replica = 0);

  /// Returns the time to score `rows` at the mean rate, or nullopt before anything is measured.
  std::optional<absl::Duration> TimeFor(double rows) const;

  /// Returns the time to score `rows` at the best recent rate, or nullopt if nothing was measured
  /// recently.
  std::optional<absl::Duration> LeastTimeFor(double rows, absl::Time now) const;

  /// Returns the time until `rows` will have left the queue, clamped to the bounds above.
  absl::Duration RetryAfter(double rows) const;

 private:
  void NoteFastest(double seconds_per_row, absl::Time now);
  /// Returns the best recent seconds per row with one replica; 0 means not measured.
  double Fastest(absl::Time now) const;

  int64_t representative_rows_;
  int num_replicas_ = 1;
  std::vector<absl::Time> last_ends_;  ///< End of the last batch of each replica.
  // The `double` members below are seconds per row with one replica; 0 means not measured.
  double mean_ = 0;
  absl::Time period_begin_ = absl::InfinitePast();  ///< Start of the period that `fastest_` covers.
  double fastest_ = 0;                              ///< Best rate of the current period.
  double earlier_fastest_ = 0;                      ///< Best rate of the kMemory before the period.
};

/// Amounts that are charged for requests. Rows are charged until a batch takes them, requests and
/// payload bytes until the last row of the payload is gathered, and bytes of fields and answers
/// until the request is answered.
struct QueueLoad {
  int64_t rows = 0;
  int64_t bytes = 0;
  int64_t requests = 0;

  QueueLoad& operator+=(const QueueLoad& other);
  QueueLoad& operator-=(const QueueLoad& other);
};

/// Keeps waiting requests within limits, in total and per client. Not thread-safe.
class Admission {
 public:
  struct Limits {
    QueueLoad total;  ///< Limits for all clients together.
    /// Share of `total` that one client may hold, in (0, 1]. A client may always hold one row, byte
    /// and request.
    double client_share = 1;
  };

  explicit Admission(const Limits& limits);

  /// Applies new limits to later calls of Admit. Admitted requests stay admitted.
  void SetLimits(const Limits& limits);

  /// Returns the limits of one client.
  static QueueLoad ClientLimits(const Limits& limits);

  // `client_share` is the share of one client, in (0, 1]; 0 means Limits::client_share.

  /// Returns OK if an idle server would admit `load`, otherwise INVALID_ARGUMENT with the value and
  /// its limit. Errors of this class carry a reason (errors.h).
  absl::Status CheckPossible(const QueueLoad& load, double client_share = 0) const;

  /// Charges `load`, or returns RESOURCE_EXHAUSTED with a retry hint from `rate`.
  absl::Status Admit(const std::string& client_id, Priority priority, const QueueLoad& load,
                     const DrainRate& rate, double client_share = 0);

  /// Releases what Admit has charged, in one or several steps.
  void Release(const std::string& client_id, Priority priority, const QueueLoad& load);

  const QueueLoad& total() const { return total_; }
  const QueueLoad& of(Priority priority) const {
    return by_priority_[static_cast<size_t>(priority)];
  }

 private:
  QueueLoad LimitOf(double client_share) const;
  absl::Duration RetryAfter(const QueueLoad& excess, const DrainRate& rate) const;

  QueueLoad limit_;
  QueueLoad client_limit_;
  QueueLoad total_;
  std::array<QueueLoad, kNumPriorities> by_priority_;
  absl::flat_hash_map<std::string, QueueLoad> by_client_;
};

}  // namespace logprobd
