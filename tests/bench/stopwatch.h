#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/cuda_resources.h"
#include "tests/bench/energy_meter.h"
#include "tests/bench/gpu_bench.h"

namespace logprobd::testing {

/// The measurements of one contender, with one element per round or per burst.
struct Times {
  std::vector<double> settled;    ///< Milliseconds.
  std::vector<double> burst;      ///< Milliseconds.
  std::vector<double> megahertz;  ///< SM clock at the end of the settled part.
  /// Average power of the settled part. Without a counter of energy, and if the settled part is
  /// too short for it, there are no elements.
  std::vector<double> watts;
  /// Energy of one call, from the same measurements.
  std::vector<double> joules;
};

/// Measures contenders in two states. A settled time is measured after untimed runs of the same
/// work, so that the power limit is in force. A burst is two milliseconds of work after 25 ms of
/// rest.
class Stopwatch {
 public:
  /// Each settled part is measured after `settle_milliseconds` of the same work, for half as long,
  /// and for at least 50 ms. Energy is measured from 1,000 ms of settling on.
  static absl::StatusOr<std::unique_ptr<Stopwatch>> Create(double settle_milliseconds);

  Timer& timer() { return timer_; }

  /// Measures all contenders in each of `rounds` rounds, each time in a new random order.
  absl::StatusOr<std::map<std::string, Times>> Measure(const std::map<std::string, Work>& works,
                                                       int rounds);

 private:
  explicit Stopwatch(double settle_milliseconds) : settle_milliseconds_(settle_milliseconds) {}
  absl::Status MeasureOnce(const Work& work, Times& times);
  /// Runs work whose call takes about `milliseconds` until it has settled. Returns the milliseconds
  /// of a call at the end.
  absl::StatusOr<double> Settled(const Work& work, double milliseconds);
  /// Returns the SM clock after some calls, in MHz.
  absl::StatusOr<double> ClockAfter(const Work& work, int calls);

  const double settle_milliseconds_;
  Timer timer_;
  DeviceBuffer clock_;
  EnergyMeter energy_meter_;
};

}  // namespace logprobd::testing
