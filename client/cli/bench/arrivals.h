#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "client/cli/bench/random.h"

namespace logprobd::client {

/// How requests of an open loop are spread over time.
enum class Arrivals {
  kPoisson,  ///< At random, each independent of the others: what many clients make together.
  kFixed,    ///< Evenly.
};

/// The planned times of requests, from the start of the run. The same seed gives the same times.
class ArrivalSchedule {
 public:
  /// `rate` requests a second, > 0.
  ArrivalSchedule(Arrivals arrivals, double rate, uint64_t seed);

  /// When the next request is due.
  absl::Duration Next();

 private:
  const Arrivals arrivals_;
  const double rate_;
  Random random_;
  int64_t planned_ = 0;
  double seconds_ = 0;
};

}  // namespace logprobd::client
