#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/base/weight_store.h"

namespace logprobd {

/// UNAVAILABLE: the server is shutting down.
absl::Status ShuttingDown();

/// Tells a load's caller how far it is and hears whether to go on; on the caller's thread.
class LoadTicker {
 public:
  using Progress = std::function<bool(const WeightsProgress&)>;

  /// How often a load that waits for something calls Tell.
  static constexpr absl::Duration kPeriod = absl::Milliseconds(20);

  /// `progress` may be empty. Both must outlive it.
  LoadTicker(const Progress& progress, const std::atomic<bool>& is_stopped)
      : progress_(progress), is_stopped_(is_stopped) {}

  /// To be called often; the caller is told a few times a second. Not OK: the load is to end with
  /// it, which is CANCELLED by the caller or UNAVAILABLE once `is_stopped`.
  absl::Status Tell(absl::string_view phase, int64_t bytes_done, int64_t bytes_total);

 private:
  const Progress& progress_;
  const std::atomic<bool>& is_stopped_;
  std::string phase_;
  absl::Time next_ = absl::InfinitePast();
};

}  // namespace logprobd
