#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/score_request.h"
#include "server/batching/drain_rate.h"

namespace logprobd {

/// What is charged: rows until a batch takes them, requests and the payload's bytes until the
/// payload has been gathered to its last row, bytes of fields and answers until they are answered.
struct QueueLoad {
  int64_t rows = 0;
  int64_t bytes = 0;
  int64_t requests = 0;

  QueueLoad& operator+=(const QueueLoad& other);
  QueueLoad& operator-=(const QueueLoad& other);
};

/// Keeps what waits within limits, in all and for each client. Not thread-safe.
class Admission {
 public:
  struct Limits {
    QueueLoad total;
    /// Share of `total` that one client may hold, in (0, 1]; at least one row and request.
    double client_share = 0.5;
  };

  explicit Admission(const Limits& limits);

  /// Holds from now on; what has been admitted stays.
  void SetLimits(const Limits& limits);

  /// What one client may hold.
  static QueueLoad ClientLimits(const Limits& limits);

  // A refusal carries its reason (RejectionOf).

  /// OK when an idle server would admit `load`, else INVALID_ARGUMENT with the value and its limit.
  absl::Status CheckPossible(const QueueLoad& load) const;

  /// Counts `load`, or says RESOURCE_EXHAUSTED with a retry hint from `rate`.
  absl::Status Admit(const std::string& client_id, Priority priority, const QueueLoad& load,
                     const DrainRate& rate);

  /// Takes off what Admit has counted, in one or several steps.
  void Release(const std::string& client_id, Priority priority, const QueueLoad& load);

  const QueueLoad& total() const { return total_; }
  const QueueLoad& of(Priority priority) const {
    return by_priority_[static_cast<size_t>(priority)];
  }

 private:
  absl::Duration RetryAfter(const QueueLoad& excess, const DrainRate& rate) const;

  QueueLoad limit_;
  QueueLoad client_limit_;
  QueueLoad total_;
  std::array<QueueLoad, kNumPriorities> by_priority_;
  absl::flat_hash_map<std::string, QueueLoad> by_client_;
};

}  // namespace logprobd
